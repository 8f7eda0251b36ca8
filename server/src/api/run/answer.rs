//! Splits an answer into its pieces: reasoning, text and calls of tools.

use super::reasoning::{ReasoningSplitter, Separated};
use super::tool_calls::{Piece, ToolCall, ToolCallParser};
use crate::api::request::ValidRequest;

/// Splits one answer.
#[derive(Debug, Default)]
pub(in crate::api) struct AnswerSplitter {
    /// Finds calls, if there may be any.
    calls: Option<ToolCallParser>,
    /// Separates reasoning from text, if the model may write any.
    reasoning: Option<ReasoningSplitter>,
}

impl AnswerSplitter {
    /// A splitter for the text `index` of a response.
    pub(in crate::api) fn of(request: &ValidRequest, index: usize) -> Self {
        Self { calls: ToolCallParser::of(request, index), reasoning: ReasoningSplitter::of(request) }
    }

    /// Whether the answer is one text, whatever is written.
    pub(in crate::api) fn is_text(&self) -> bool {
        self.calls.is_none() && self.reasoning.is_none()
    }

    /// Whether reasoning may begin, or has not ended.
    pub(in crate::api) fn may_reason(&self) -> bool {
        self.reasoning.as_ref().is_some_and(ReasoningSplitter::is_before_answer)
    }

    /// Whether reasoning has begun and not ended. The prompt may have begun it, and calls follow instead.
    pub(in crate::api) fn is_reasoning(&self) -> bool {
        self.reasoning.as_ref().is_some_and(ReasoningSplitter::is_open)
    }

    /// Whether the answer ends with text, if only an empty one. It does not if its reasoning was cut off.
    pub(in crate::api) fn ends_with_text(&self) -> bool {
        !self.calls_only() && !self.reasoning.as_ref().is_some_and(ReasoningSplitter::is_in_words)
    }

    /// Whether the answer is one or more complete calls.
    pub(in crate::api) fn has_called(&self) -> bool {
        self.calls.as_ref().is_some_and(ToolCallParser::has_called)
    }

    /// Whether the answer has begun a call, and so has no text.
    pub(in crate::api) fn calls_only(&self) -> bool {
        self.calls.as_ref().is_some_and(|calls| !calls.is_plain())
    }

    /// The calls so far, the last of which may be unfinished.
    pub(in crate::api) fn calls(&self) -> &[ToolCall] {
        self.calls.as_ref().map_or(&[], ToolCallParser::calls)
    }

    /// Adds text of the answer. A token without text makes no piece.
    pub(in crate::api) fn push(&mut self, text: &str) -> Vec<Piece> {
        let mut pieces = Vec::new();
        match &mut self.calls {
            Some(calls) => calls.push(text, &mut pieces),
            None if text.is_empty() => {}
            None => pieces.push(Piece::Text(text.to_owned())),
        }
        self.separate(pieces)
    }

    /// Ends the answer: the pieces that were held back.
    pub(in crate::api) fn finish(&mut self) -> Vec<Piece> {
        let mut pieces = Vec::new();
        if let Some(calls) = &mut self.calls {
            calls.finish(&mut pieces);
        }
        let mut out = self.separate(pieces);
        out.extend(self.reasoning.as_mut().map(ReasoningSplitter::finish).into_iter().flat_map(Separated::pieces));
        out
    }

    /// Separates reasoning from text.
    fn separate(&mut self, pieces: Vec<Piece>) -> Vec<Piece> {
        let Some(reasoning) = &mut self.reasoning else { return pieces };
        let mut out = Vec::new();
        for piece in pieces {
            match piece {
                Piece::Text(text) => out.extend(reasoning.push(&text).pieces()),
                call => out.push(call),
            }
        }
        out
    }
}
