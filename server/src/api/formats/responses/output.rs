//! The output of a response as it is generated: which items it has, and the events of each.

use rand::Rng;

use super::events::{Events, Payload};
use super::items::{CallKind, FunctionCall, Message, MessageKind, OutputItem, Role, Status, TextPart};
use crate::api::run::tool_calls::{Piece, ToolCallParser};

/// The output of one response, of which the last item may be unfinished.
pub(super) struct Output {
    /// Separates calls from text, if there may be calls.
    parser: Option<ToolCallParser>,
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

impl Output {
    pub(super) fn new(parser: Option<ToolCallParser>) -> Self {
        Self { parser, items: Vec::new(), open: false }
    }

    /// The beginning of the answer. If it can make no calls, its message begins at once.
    pub(super) fn open(&mut self, to: &mut Events<'_>) {
        if self.parser.is_none() {
            self.begin(OutputItem::Message(Message::begun()), to);
        }
    }

    /// Adds text of the answer.
    pub(super) fn push(&mut self, text: &str, to: &mut Events<'_>) {
        let mut pieces = Vec::new();
        match &mut self.parser {
            Some(parser) => parser.push(text, &mut pieces),
            // A token without text makes no event.
            None if text.is_empty() => {}
            None => pieces.push(Piece::Text(text.to_owned())),
        }
        self.take(pieces, to);
    }

    /// Ends the answer, whose status is the response's.
    pub(super) fn finish(&mut self, status: Status, to: &mut Events<'_>) {
        let mut pieces = Vec::new();
        if let Some(parser) = &mut self.parser {
            parser.finish(&mut pieces);
        }
        self.take(pieces, to);
        let status = match (&self.parser, self.items.last()) {
            // An answer may end in a call, at a stop string or at its greatest length, and also right after one.
            (Some(parser), Some(OutputItem::Call(_))) if parser.has_called() => Status::Completed,
            (_, Some(OutputItem::Call(_))) => Status::Incomplete,
            _ => status,
        };
        self.end(status, to);
    }

    /// The items as they are when the answer fails.
    pub(super) fn failed(&self) -> Vec<OutputItem> {
        let mut items = self.items.clone();
        if let Some(last) = items.last_mut() {
            last.set_status(Status::Incomplete);
        }
        items
    }

    /// All items, after [`Self::finish`].
    pub(super) fn items(&self) -> &[OutputItem] {
        &self.items
    }

    fn take(&mut self, pieces: Vec<Piece>, to: &mut Events<'_>) {
        for piece in pieces {
            match piece {
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
    /// Sends all events of an item that is complete.
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
            Self::Message(Message { status, .. }) | Self::Call(FunctionCall { status, .. }) => *status = to,
        }
    }

    /// The text of a message, or the arguments of a call.
    fn text_mut(&mut self) -> &mut String {
        match self {
            Self::Message(message) => {
                if message.content.is_empty() {
                    message.content.push(TextPart::default());
                }
                &mut message.content[0].text
            }
            Self::Call(call) => &mut call.arguments,
        }
    }

    fn send_begin(&self, output_index: usize, to: &mut Events<'_>) {
        let mut item = self.clone();
        item.set_status(Status::InProgress);
        match &mut item {
            Self::Message(message) => message.content.clear(),
            Self::Call(call) => call.arguments.clear(),
        }
        to.send("response.output_item.added", Payload::Item { output_index, item: &item });
        if let Self::Message(Message { id, .. }) = self {
            let part = &TextPart::default();
            let part = Payload::Part { item_id: id, output_index, content_index: 0, part };
            to.send("response.content_part.added", part);
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
        }
        to.send("response.output_item.done", Payload::Item { output_index, item: self });
    }
}
