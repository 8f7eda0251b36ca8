//! Waits for what a run handles next: an event of its texts, a stop, or a disconnect.

use std::time::Duration;

use super::encoder::StreamEvent;
use super::sink::Sink;
use super::{Next, Run};
use crate::metrics::Meter;

impl Run {
    /// Sends the events in `out` and waits for what comes next. A run that is finishing does not wait for a reader: it
    /// has little left to send, and sends it at its end. A stop that arrives meanwhile loses nothing, because both
    /// waits are cancel-safe.
    pub(super) async fn next(
        &mut self,
        sink: &mut Sink,
        out: &mut Vec<StreamEvent>,
        meter: &mut Meter,
        (limit, finishing): (Duration, bool),
    ) -> Next {
        if !finishing {
            let sent = tokio::select! {
                biased;
                stop = self.registration.stopped() => return Next::Stop(stop),
                sent = sink.send(out, limit) => sent,
            };
            // A client that reads nothing for too long counts as disconnected: it must not lock the session forever.
            if !sent {
                if sink.has_reader() {
                    meter.stalled();
                }
                return Next::Disconnected;
            }
            meter.delivered();
        }
        tokio::select! {
            biased;
            stop = self.registration.stopped() => Next::Stop(stop),
            () = sink.disconnected() => Next::Disconnected,
            event = self.texts.next() => Next::Event(event),
        }
    }
}
