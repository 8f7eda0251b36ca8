//! The texts of one request while they grow.

use std::future::poll_fn;
use std::task::Poll;

use crate::api::run::account::Account;
use crate::engine::{Event, EventStream, Failure};

/// The events of one request's texts, taken from each in turn. Dropping it cancels them.
pub(in crate::api) struct Texts {
    pub(in crate::api) account: Account,
    streams: Vec<Option<EventStream>>,
    /// The text that is asked first: each in turn, or one that always has something would let the others stall.
    turn: usize,
}

impl Texts {
    pub(in crate::api) fn new(mut account: Account, streams: Vec<EventStream>) -> Self {
        account.expect(streams.len());
        account.taken();
        Self { account, streams: streams.into_iter().map(Some).collect(), turn: 0 }
    }

    /// How many texts there are.
    pub(in crate::api) fn count(&self) -> usize {
        self.streams.len()
    }

    /// The next event of any text, with the text's index. Must not be called when all have ended. Nothing is lost
    /// where it is dropped before it is ready.
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
        // A channel that closes without a last event belongs to an engine that is gone.
        let outcome = match event.unwrap_or(Event::Failed(Failure::Internal)) {
            Event::Failed(failure) => Err(failure),
            event => Ok((index, event)),
        };
        match &outcome {
            Ok((_, Event::Delta(delta))) => self.account.generated(delta.token_ids.len()),
            Ok((_, Event::Finished(finish))) => {
                self.account.finish(finish);
                self.streams[index] = None;
            }
            Err(failure) => self.account.fail(*failure),
            Ok(_) => {}
        }
        outcome
    }

    /// Ends all texts with what they have by now.
    pub(in crate::api) fn interrupt(&self) {
        self.streams.iter().flatten().for_each(|stream| stream.interrupt().now());
    }
}
