//! The engine's end of a request's events: it never blocks, and it never drops text.
//!
//! What a slow reader has no room for is put together here; once too much is unread, the sequence has to pause.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{Sender, error::TrySendError};

use super::event::{Delta, Event, TokenLogprobs};

/// Tokens that may wait here for their reader before their sequence pauses.
const UNREAD_TOKENS: usize = 256;

/// What a flush found at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reader {
    /// Everything has been handed over.
    UpToDate,
    /// Something still waits.
    Behind,
    /// Nobody is there any more.
    Gone,
}

/// The sending end of one request's events.
pub(super) struct Outlet {
    sender: Sender<Event>,
    /// What is told of the prompt, before all text.
    first: VecDeque<Event>,
    unread: Delta,
    last: Option<Event>,
    behind_since: Option<Instant>,
}

impl Outlet {
    pub(super) fn new(sender: Sender<Event>) -> Self {
        Self { sender, first: VecDeque::new(), unread: Delta::default(), last: None, behind_since: None }
    }

    /// Adds an event that tells of the prompt.
    pub(super) fn of_prompt(&mut self, event: Event) {
        self.first.push_back(event);
    }

    /// Adds a token, the text that it brought and its log probabilities, where all tokens have them.
    pub(super) fn push(&mut self, token: u32, text: &str, scored: Option<TokenLogprobs>) {
        self.unread.text.push_str(text);
        self.unread.token_ids.push(token);
        self.unread.logprobs.extend(scored);
    }

    /// Sets the event that ends the request, to be sent after all text. The reader's time starts anew: one that has
    /// just stalled would otherwise be given up before it could learn so.
    pub(super) fn end(&mut self, event: Event) {
        self.last = Some(event);
        self.behind_since = None;
    }

    /// Hands over as much as the reader has room for.
    pub(super) fn flush(&mut self) -> Reader {
        let outcome = self.try_flush();
        match outcome {
            Reader::UpToDate => self.behind_since = None,
            Reader::Behind => _ = self.behind_since.get_or_insert_with(Instant::now),
            Reader::Gone => {}
        }
        outcome
    }

    fn try_flush(&mut self) -> Reader {
        if self.sender.is_closed() {
            return Reader::Gone;
        }
        while self.has_something() {
            // The room first: what finds none stays where it is.
            let room = match self.sender.try_reserve() {
                Ok(room) => room,
                Err(TrySendError::Full(())) => return Reader::Behind,
                Err(TrySendError::Closed(())) => return Reader::Gone,
            };
            if let Some(event) = self.first.pop_front() {
                room.send(event);
            } else if !self.unread.token_ids.is_empty() {
                room.send(Event::Delta(std::mem::take(&mut self.unread)));
            } else if let Some(last) = self.last.take() {
                room.send(last);
            }
        }
        Reader::UpToDate
    }

    fn has_something(&self) -> bool {
        !self.first.is_empty() || !self.unread.token_ids.is_empty() || self.last.is_some()
    }

    /// Whether so much is unread that nothing more may be generated.
    pub(super) fn is_full(&self) -> bool {
        self.unread.token_ids.len() >= UNREAD_TOKENS
    }

    /// Whether the reader has taken nothing for longer than `limit`.
    pub(super) fn is_stalled(&self, limit: Duration) -> bool {
        self.behind_since.is_some_and(|since| since.elapsed() > limit)
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;

    use super::*;
    use crate::engine::Failure;

    #[test]
    fn text_that_finds_no_room_is_put_together_and_none_is_lost() {
        let (sender, mut receiver) = mpsc::channel(1);
        let mut outlet = Outlet::new(sender);
        outlet.push(1, "a", None);
        assert_eq!(outlet.flush(), Reader::UpToDate);
        outlet.push(2, "b", None);
        assert_eq!(outlet.flush(), Reader::Behind);
        outlet.push(3, "c", None);
        outlet.end(Event::Failed(Failure::Internal));
        assert_eq!(outlet.flush(), Reader::Behind);
        assert!(outlet.is_stalled(Duration::ZERO) && !outlet.is_stalled(Duration::from_mins(1)));

        let delta = |text: &str, ids: &[u32]| {
            Event::Delta(Delta { text: text.into(), token_ids: ids.into(), ..Delta::default() })
        };
        assert_eq!(receiver.try_recv().unwrap(), delta("a", &[1]));
        assert_eq!(outlet.flush(), Reader::Behind);
        assert_eq!(receiver.try_recv().unwrap(), delta("bc", &[2, 3]));
        assert_eq!(outlet.flush(), Reader::UpToDate);
        assert_eq!(receiver.try_recv().unwrap(), Event::Failed(Failure::Internal));
        drop(receiver);
        assert_eq!(outlet.flush(), Reader::Gone);
    }

    #[test]
    fn an_outlet_is_full_at_its_bound() {
        let (sender, _receiver) = mpsc::channel(1);
        let mut outlet = Outlet::new(sender);
        for _ in 0..UNREAD_TOKENS {
            assert!(!outlet.is_full());
            outlet.push(0, "", None);
        }
        assert!(outlet.is_full());
    }
}
