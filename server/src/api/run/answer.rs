//! Splits an answer into its pieces: reasoning, text and tool calls.

use super::reasoning::{ReasoningSplitter, Separated};
use super::tool_calls::{Piece, ToolCall, ToolCallParser};
use crate::api::request::ValidRequest;

/// Splits one answer.
#[derive(Debug, Default)]
pub(in crate::api) struct AnswerSplitter {
    /// Finds tool calls, if the answer may have any.
    calls: Option<ToolCallParser>,
    /// Separates reasoning from text, if the model may write reasoning.
    reasoning: Option<ReasoningSplitter>,
}

impl AnswerSplitter {
    /// Creates a splitter for the text `index` of a response.
    pub(in crate::api) fn of(request: &ValidRequest, index: usize) -> Self {
        Self { calls: ToolCallParser::of(request, index), reasoning: request.reasoning.map(ReasoningSplitter::new) }
    }

    /// Whether the answer is a single text, whatever the model writes.
    pub(in crate::api) fn is_text(&self) -> bool {
        self.calls.is_none() && self.reasoning.is_none()
    }

    /// Whether reasoning may still begin, or has not ended.
    pub(in crate::api) fn may_reason(&self) -> bool {
        self.reasoning.as_ref().is_some_and(ReasoningSplitter::is_before_answer)
    }

    /// Whether reasoning has begun and not ended.
    pub(in crate::api) fn is_reasoning(&self) -> bool {
        self.reasoning.as_ref().is_some_and(ReasoningSplitter::is_open)
    }

    /// Whether the answer ends with text, which may be empty. It does not if it is made of calls or its reasoning was
    /// cut off.
    pub(in crate::api) fn ends_with_text(&self) -> bool {
        !self.calls_only() && !self.reasoning.as_ref().is_some_and(ReasoningSplitter::is_in_words)
    }

    /// Whether the answer consists of one or more complete calls.
    pub(in crate::api) fn has_called(&self) -> bool {
        self.calls.as_ref().is_some_and(ToolCallParser::has_called)
    }

    /// Whether the answer has begun a call, and so has no text.
    pub(in crate::api) fn calls_only(&self) -> bool {
        self.calls.as_ref().is_some_and(|calls| !calls.is_plain())
    }

    /// Returns the calls so far, the last of which may be unfinished.
    pub(in crate::api) fn calls(&self) -> &[ToolCall] {
        self.calls.as_ref().map_or(&[], ToolCallParser::calls)
    }

    /// Adds text of the answer, and returns its pieces. A token without text yields no piece.
    pub(in crate::api) fn push(&mut self, text: &str) -> Vec<Piece> {
        match &mut self.reasoning {
            Some(reasoning) => {
                let separated = reasoning.push(text);
                self.pieces(separated)
            }
            None => self.pieces(Separated { answer: text.to_owned(), ..Separated::default() }),
        }
    }

    /// Ends the answer, and returns the pieces that were held back.
    pub(in crate::api) fn finish(&mut self) -> Vec<Piece> {
        let separated = self.reasoning.as_mut().map(ReasoningSplitter::finish).unwrap_or_default();
        let mut pieces = self.pieces(separated);
        if let Some(calls) = &mut self.calls {
            calls.finish(&mut pieces);
        }
        pieces
    }

    fn pieces(&mut self, Separated { reasoning, answer }: Separated) -> Vec<Piece> {
        let mut pieces = Vec::new();
        if !reasoning.is_empty() {
            pieces.push(Piece::Reasoning(reasoning));
        }
        match &mut self.calls {
            Some(calls) => calls.push(&answer, &mut pieces),
            None if answer.is_empty() => {}
            None => pieces.push(Piece::Text(answer)),
        }
        pieces
    }
}
