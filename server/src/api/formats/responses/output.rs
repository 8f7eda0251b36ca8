//! The output of a response while it is generated: its items, and the events of each.

use rand::Rng;

use super::events::{Events, Payload};
use super::items::{
    CallKind, FunctionCall, Message, MessageKind, OutputItem, ReasoningItem, ReasoningKind, ReasoningPart, Role,
    Status, TextPart,
};
use crate::api::run::answer::AnswerSplitter;
use crate::api::run::tool_calls::Piece;

/// The output of one response, whose last item may be unfinished.
pub(super) struct Output {
    splitter: AnswerSplitter,
    items: Vec<OutputItem>,
    open: bool,
}

fn id(kind: &str) -> String {
    format!("{kind}_{:032x}", rand::rng().random::<u128>())
}

impl Message {
    fn begun() -> Self {
        let (id, kind, role) = (id("msg"), MessageKind::Message, Role::Assistant);
        Self { id, kind, status: Status::InProgress, role, content: vec![TextPart::default()] }
    }
}

impl ReasoningItem {
    fn begun() -> Self {
        let (id, kind, status) = (id("rs"), ReasoningKind::Reasoning, Status::InProgress);
        Self { id, kind, status, summary: Vec::new(), content: vec![ReasoningPart::default()] }
    }
}

impl Output {
    pub(super) fn new(splitter: AnswerSplitter) -> Self {
        Self { splitter, items: Vec::new(), open: false }
    }

    /// Whether reasoning may still begin, or has not ended.
    pub(super) fn may_reason(&self) -> bool {
        self.splitter.may_reason()
    }

    /// Whether the answer has reasoning.
    pub(super) fn has_reasoning(&self) -> bool {
        self.items.iter().any(|item| matches!(item, OutputItem::Reasoning(_)))
    }

    /// Whether the answer's reasoning has begun and not ended.
    pub(super) fn is_reasoning(&self) -> bool {
        self.splitter.is_reasoning()
    }

    /// Begins the answer. If it can hold only text, its message begins at once.
    pub(super) fn open(&mut self, to: &mut Events<'_>) {
        if self.splitter.is_text() {
            self.begin(OutputItem::Message(Message::begun()), to);
        }
    }

    /// Adds generated text to the answer.
    pub(super) fn push(&mut self, text: &str, to: &mut Events<'_>) {
        let pieces = self.splitter.push(text);
        self.take(pieces, to);
    }

    /// Ends the answer. `status` is that of the response.
    pub(super) fn finish(&mut self, status: Status, to: &mut Events<'_>) {
        let pieces = self.splitter.finish();
        self.take(pieces, to);
        // Clients expect a message, even an empty one.
        if self.splitter.ends_with_text() && !matches!(self.items.last(), Some(OutputItem::Message(_))) {
            self.begin(OutputItem::Message(Message::begun()), to);
        }
        let status = match self.items.last() {
            // A stop string or the length limit may end an answer in the middle of a call, or right after one.
            Some(OutputItem::Call(_)) if self.splitter.has_called() => Status::Completed,
            Some(OutputItem::Call(_)) => Status::Incomplete,
            _ => status,
        };
        self.end(status, to);
    }

    /// Returns the items of an answer that fails.
    pub(super) fn failed(&self) -> Vec<OutputItem> {
        let mut items = self.items.clone();
        if let Some(last) = items.last_mut() {
            last.set_status(Status::Incomplete);
        }
        items
    }

    /// Returns all items. Call [`Self::finish`] first.
    pub(super) fn items(&self) -> &[OutputItem] {
        &self.items
    }

    fn take(&mut self, pieces: Vec<Piece>, to: &mut Events<'_>) {
        for piece in pieces {
            match piece {
                Piece::Reasoning(text) => {
                    if !matches!(self.items.last(), Some(OutputItem::Reasoning(_))) {
                        self.begin(OutputItem::Reasoning(ReasoningItem::begun()), to);
                    }
                    self.add(&text, to);
                }
                Piece::Text(text) => {
                    if !matches!(self.items.last(), Some(OutputItem::Message(_))) {
                        self.begin(OutputItem::Message(Message::begun()), to);
                    }
                    self.add(&text, to);
                }
                Piece::CallStart { id: call_id, name, .. } => {
                    let (kind, status) = (CallKind::FunctionCall, Status::InProgress);
                    let call = FunctionCall { id: id("fc"), kind, status, call_id, name, arguments: String::new() };
                    self.begin(OutputItem::Call(call), to);
                }
                Piece::Arguments { text, .. } => self.add(&text, to),
            }
        }
    }

    fn begin(&mut self, item: OutputItem, to: &mut Events<'_>) {
        self.end(Status::Completed, to);
        item.send_begin(self.items.len(), to);
        self.items.push(item);
        self.open = true;
    }

    /// Adds text to the last item.
    fn add(&mut self, text: &str, to: &mut Events<'_>) {
        let output_index = self.items.len().saturating_sub(1);
        if let Some(item) = self.items.last_mut() {
            item.text_mut().push_str(text);
            item.send_delta(output_index, text, to);
        }
    }

    fn end(&mut self, status: Status, to: &mut Events<'_>) {
        let output_index = self.items.len().saturating_sub(1);
        if let (Some(item), true) = (self.items.last_mut(), std::mem::take(&mut self.open)) {
            item.set_status(status);
            item.send_end(output_index, to);
        }
    }
}

impl OutputItem {
    /// Sends all events of a complete item.
    pub(super) fn replay(&self, output_index: usize, to: &mut Events<'_>) {
        self.send_begin(output_index, to);
        let text = self.clone().text_mut().clone();
        if !text.is_empty() {
            self.send_delta(output_index, &text, to);
        }
        self.send_end(output_index, to);
    }

    fn set_status(&mut self, to: Status) {
        match self {
            Self::Message(Message { status, .. })
            | Self::Call(FunctionCall { status, .. })
            | Self::Reasoning(ReasoningItem { status, .. }) => *status = to,
        }
    }

    /// Returns the text of a message or of reasoning, or the arguments of a call.
    fn text_mut(&mut self) -> &mut String {
        match self {
            Self::Message(message) => {
                if message.content.is_empty() {
                    message.content.push(TextPart::default());
                }
                &mut message.content[0].text
            }
            Self::Call(call) => &mut call.arguments,
            Self::Reasoning(reasoning) => {
                if reasoning.content.is_empty() {
                    reasoning.content.push(ReasoningPart::default());
                }
                &mut reasoning.content[0].text
            }
        }
    }

    fn send_begin(&self, output_index: usize, to: &mut Events<'_>) {
        let mut item = self.clone();
        item.set_status(Status::InProgress);
        match &mut item {
            Self::Message(message) => message.content.clear(),
            Self::Call(call) => call.arguments.clear(),
            Self::Reasoning(reasoning) => reasoning.content.clear(),
        }
        to.send("response.output_item.added", Payload::Item { output_index, item: &item });
        let (added, content_index) = ("response.content_part.added", 0);
        match self {
            Self::Message(Message { id: item_id, .. }) => {
                let part = &TextPart::default();
                to.send(added, Payload::Part { item_id, output_index, content_index, part });
            }
            Self::Reasoning(ReasoningItem { id: item_id, .. }) => {
                let part = &ReasoningPart::default();
                to.send(added, Payload::ReasoningPart { item_id, output_index, content_index, part });
            }
            Self::Call(_) => {}
        }
    }

    fn send_delta(&self, output_index: usize, delta: &str, to: &mut Events<'_>) {
        match self {
            Self::Message(Message { id, .. }) => {
                let delta = Payload::Delta { item_id: id, output_index, content_index: 0, delta, logprobs: [] };
                to.send("response.output_text.delta", delta);
            }
            Self::Call(FunctionCall { id, .. }) => {
                let delta = Payload::ArgumentsDelta { item_id: id, output_index, delta };
                to.send("response.function_call_arguments.delta", delta);
            }
            Self::Reasoning(ReasoningItem { id, .. }) => {
                let delta = Payload::ReasoningDelta { item_id: id, output_index, content_index: 0, delta };
                to.send("response.reasoning_text.delta", delta);
            }
        }
    }

    fn send_end(&self, output_index: usize, to: &mut Events<'_>) {
        match self {
            Self::Message(Message { id, content, .. }) => {
                for part in content {
                    let (content_index, logprobs) = (0, []);
                    let text = Payload::Text { item_id: id, output_index, content_index, text: &part.text, logprobs };
                    to.send("response.output_text.done", text);
                    let done = Payload::Part { item_id: id, output_index, content_index, part };
                    to.send("response.content_part.done", done);
                }
            }
            Self::Call(FunctionCall { id, name, arguments, .. }) => {
                let done = Payload::Arguments { item_id: id, output_index, name, arguments };
                to.send("response.function_call_arguments.done", done);
            }
            Self::Reasoning(ReasoningItem { id: item_id, content, .. }) => {
                for part in content {
                    let content_index = 0;
                    let text = Payload::Reasoning { item_id, output_index, content_index, text: &part.text };
                    to.send("response.reasoning_text.done", text);
                    let done = Payload::ReasoningPart { item_id, output_index, content_index, part };
                    to.send("response.content_part.done", done);
                }
            }
        }
        to.send("response.output_item.done", Payload::Item { output_index, item: self });
    }
}
