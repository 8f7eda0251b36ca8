//! The engine's end of a request's event channel. It never blocks and never drops text.
//!
//! If the reader is slow and the channel is full, text is collected here and sent as one piece. The sequence pauses
//! once too much is unread.

use std::time::{Duration, Instant};

use tokio::sync::mpsc::{Sender, error::TrySendError};

use super::event::{Delta, Event, TokenLogprobs};

/// Tokens that may be unread before their sequence pauses; each log probability listed with a token counts as one more.
const UNREAD_TOKENS: usize = 256;

/// The outcome of a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flush {
    /// Everything has been sent.
    Complete,
    /// The channel is full, and something still waits to be sent.
    Full,
    /// The receiver has been dropped.
    Closed,
}

/// Sends one request's events.
pub(super) struct EventSender {
    sender: Sender<Event>,
    /// The event about the prompt, which comes before all text.
    prompt: Option<Event>,
    unread: Delta,
    last: Option<Event>,
    full_since: Option<Instant>,
}

impl EventSender {
    pub(super) fn new(sender: Sender<Event>) -> Self {
        Self { sender, prompt: None, unread: Delta::default(), last: None, full_since: None }
    }

    /// Sets the event about the prompt.
    pub(super) fn set_prompt(&mut self, event: Event) {
        self.prompt = Some(event);
    }

    /// Adds a token with its text and its log probabilities. Either all tokens have log probabilities or none has.
    pub(super) fn push(&mut self, token: u32, text: &str, logprobs: Option<TokenLogprobs>) {
        if !self.unread.token_ids.is_empty() {
            self.unread.ends.push(self.unread.text.len());
        }
        self.unread.text.push_str(text);
        self.unread.token_ids.push(token);
        self.unread.logprobs.extend(logprobs);
    }

    /// Sets the last event, which is sent after all text. The reader's time limit restarts: otherwise a stalled reader
    /// would be dropped before it could receive this event.
    pub(super) fn end(&mut self, event: Event) {
        self.last = Some(event);
        self.full_since = None;
    }

    /// Sends as much as the channel has room for.
    pub(super) fn flush(&mut self) -> Flush {
        let outcome = self.try_flush();
        match outcome {
            Flush::Complete => self.full_since = None,
            Flush::Full => _ = self.full_since.get_or_insert_with(Instant::now),
            Flush::Closed => {}
        }
        outcome
    }

    fn try_flush(&mut self) -> Flush {
        if self.sender.is_closed() {
            return Flush::Closed;
        }
        while self.has_unsent() {
            // Reserve first: what has no room stays here.
            let permit = match self.sender.try_reserve() {
                Ok(permit) => permit,
                Err(TrySendError::Full(())) => return Flush::Full,
                Err(TrySendError::Closed(())) => return Flush::Closed,
            };
            if let Some(event) = self.prompt.take() {
                permit.send(event);
            } else if !self.unread.token_ids.is_empty() {
                permit.send(Event::Delta(std::mem::take(&mut self.unread)));
            } else if let Some(last) = self.last.take() {
                permit.send(last);
            }
        }
        Flush::Complete
    }

    fn has_unsent(&self) -> bool {
        self.prompt.is_some() || !self.unread.token_ids.is_empty() || self.last.is_some()
    }

    /// Whether so much is unread that no more tokens may be generated.
    pub(super) fn is_full(&self) -> bool {
        let each = self.unread.logprobs.last().map_or(1, |logprobs| logprobs.top.len() + 2);
        self.unread.token_ids.len() * each >= UNREAD_TOKENS
    }

    /// Whether the reader has read nothing for longer than `limit`.
    pub(super) fn is_stalled(&self, limit: Duration) -> bool {
        self.full_since.is_some_and(|since| since.elapsed() > limit)
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;

    use super::*;
    use crate::engine::Failure;

    #[test]
    fn text_that_finds_no_room_is_joined_and_none_is_lost() {
        let (sender, mut receiver) = mpsc::channel(1);
        let mut events = EventSender::new(sender);
        events.push(1, "a", None);
        assert_eq!(events.flush(), Flush::Complete);
        events.push(2, "b", None);
        assert_eq!(events.flush(), Flush::Full);
        events.push(3, "c", None);
        events.end(Event::Failed(Failure::Internal));
        assert_eq!(events.flush(), Flush::Full);
        assert!(events.is_stalled(Duration::ZERO) && !events.is_stalled(Duration::from_mins(1)));

        let delta = |text: &str, ids: &[u32]| Delta { text: text.into(), token_ids: ids.into(), ..Delta::default() };
        assert_eq!(receiver.try_recv().unwrap(), Event::Delta(delta("a", &[1])));
        assert_eq!(events.flush(), Flush::Full);
        let joined = Delta { ends: vec![1], ..delta("bc", &[2, 3]) };
        assert_eq!(receiver.try_recv().unwrap(), Event::Delta(joined.clone()));
        assert_eq!(joined.tokens().collect::<Vec<_>>(), [delta("b", &[2]), delta("c", &[3])]);
        assert_eq!(events.flush(), Flush::Complete);
        assert_eq!(receiver.try_recv().unwrap(), Event::Failed(Failure::Internal));
        drop(receiver);
        assert_eq!(events.flush(), Flush::Closed);
    }

    #[test]
    fn a_sender_is_full_at_its_bound() {
        let (sender, _receiver) = mpsc::channel(1);
        let mut events = EventSender::new(sender);
        for _ in 0..UNREAD_TOKENS {
            assert!(!events.is_full());
            events.push(0, "", None);
        }
        assert!(events.is_full());

        // Log probabilities use up the same bound as tokens.
        let (sender, _receiver) = mpsc::channel(1);
        let mut events = EventSender::new(sender);
        for token in 0..16 {
            assert!(!events.is_full());
            events.push(token, "", Some(TokenLogprobs { token, logprob: 0.0, top: vec![(0, 0.0); 14] }));
        }
        assert!(events.is_full());
    }
}
