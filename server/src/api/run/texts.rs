//! The texts of one request while they are generated.

use std::future::poll_fn;
use std::task::Poll;

use super::usage::UsageRecorder;
use crate::engine::{Event, EventStream, Failure};

/// The events of one request's texts. Dropping it cancels the texts.
pub(in crate::api) struct Texts {
    pub(in crate::api) recorder: UsageRecorder,
    streams: Vec<Option<EventStream>>,
    /// The index of the text that is polled first. It rotates, so that a busy text cannot starve the others.
    turn: usize,
}

impl Texts {
    pub(in crate::api) fn new(recorder: UsageRecorder, streams: Vec<EventStream>) -> Self {
        Self { recorder, streams: streams.into_iter().map(Some).collect(), turn: 0 }
    }

    /// Returns the number of texts.
    pub(in crate::api) fn count(&self) -> usize {
        self.streams.len()
    }

    /// Returns the next event of any text, with the text's index. Must not be called once all texts have ended.
    /// Cancel-safe.
    pub(in crate::api) async fn next(&mut self) -> Result<(usize, Event), Failure> {
        let count = self.streams.len();
        let (index, event) = poll_fn(|context| {
            for offset in 0..count {
                let index = (self.turn + offset) % count;
                if let Some(stream) = &mut self.streams[index]
                    && let Poll::Ready(event) = stream.poll_next(context)
                {
                    return Poll::Ready((index, event));
                }
            }
            Poll::Pending
        })
        .await;
        self.turn = index + 1;
        // A channel that closes without a last event means that the engine has stopped.
        let outcome = match event.unwrap_or(Event::Failed(Failure::Internal)) {
            Event::Failed(failure) => Err(failure),
            event => Ok((index, event)),
        };
        match &outcome {
            Ok((_, Event::Delta(delta))) => self.recorder.generated(delta.token_ids.len()),
            Ok((_, Event::Finished(finish))) => {
                self.recorder.finish(finish);
                self.streams[index] = None;
            }
            Err(failure) => self.recorder.fail(*failure),
            Ok(_) => {}
        }
        outcome
    }

    /// Ends all texts with what they have so far.
    pub(in crate::api) fn interrupt(&self) {
        self.streams.iter().flatten().for_each(|stream| stream.interrupt().now());
    }
}
