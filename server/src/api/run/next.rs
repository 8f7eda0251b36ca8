//! What a run waits for: events of its texts, its stop, and the end of its connection.

use std::time::Duration;

use super::encoder::StreamEvent;
use super::sink::Sink;
use super::{Next, Run};
use crate::metrics::Meter;

impl Run {
    /// Sends the events in `out` and waits for what comes next. A run that is finishing waits for no reader: what it still
    /// has to send is little, and is sent at its end. Nothing is lost by waiting for a stop at the same time.
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
