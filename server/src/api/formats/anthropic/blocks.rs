//! The blocks of a message as it grows: its text, and its calls of tools.

use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::api::request::tools::{Piece, Reader};

/// A block, whole or at its beginning.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = AnthropicBlock)]
pub(super) enum Block {
    Text {
        text: String,
    },
    ToolUse {
        id: String,
        name: String,
        #[schema(value_type = Object)]
        input: Map<String, Value>,
    },
}

/// More of a block.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = AnthropicDelta)]
pub(super) enum More {
    TextDelta { text: String },
    InputJsonDelta { partial_json: String },
}

/// What has happened to the block of this place.
#[derive(Debug)]
pub(super) enum Change {
    Start(usize, Block),
    More(usize, More),
    Stop(usize),
}

/// The blocks of one message.
#[derive(Debug)]
pub(super) struct Blocks {
    /// What tells calls from text, where there may be any.
    reader: Option<Reader>,
    begun: Vec<Block>,
    /// The text of the input of the last block, where that is a call.
    input: String,
    open: bool,
}

impl Blocks {
    pub(super) fn new(reader: Option<Reader>) -> Self {
        Self { reader, begun: Vec::new(), input: String::new(), open: false }
    }

    /// The beginning: a message that can be nothing but text has its block at once.
    pub(super) fn open(&mut self, out: &mut Vec<Change>) {
        if self.reader.is_none() {
            self.start(Block::Text { text: String::new() }, out);
        }
    }

    /// More of the message.
    pub(super) fn push(&mut self, text: &str, out: &mut Vec<Change>) {
        let mut pieces = Vec::new();
        match &mut self.reader {
            Some(reader) => reader.push(text, &mut pieces),
            None if text.is_empty() => {}
            None => pieces.push(Piece::Text(text.to_owned())),
        }
        self.take(pieces, out);
    }

    /// The end of the message.
    pub(super) fn finish(&mut self, out: &mut Vec<Change>) {
        let mut pieces = Vec::new();
        if let Some(reader) = &mut self.reader {
            reader.finish(&mut pieces);
        }
        self.take(pieces, out);
        self.stop(out);
    }

    /// Whether the message is whole calls.
    pub(super) fn has_called(&self) -> bool {
        self.reader.as_ref().is_some_and(Reader::has_called)
    }

    /// All blocks, after [`Self::finish`].
    pub(super) fn all(&self) -> &[Block] {
        &self.begun
    }

    fn take(&mut self, pieces: Vec<Piece>, out: &mut Vec<Change>) {
        for piece in pieces {
            match piece {
                Piece::Text(text) => {
                    if !matches!(self.begun.last(), Some(Block::Text { .. })) {
                        self.start(Block::Text { text: String::new() }, out);
                    }
                    if let Some(Block::Text { text: whole }) = self.begun.last_mut() {
                        whole.push_str(&text);
                    }
                    out.push(Change::More(self.begun.len() - 1, More::TextDelta { text }));
                }
                Piece::Call(call) => {
                    if let Some((id, name)) = call.head() {
                        let (id, name) = (id.to_owned(), name.to_owned());
                        self.start(Block::ToolUse { id, name, input: Map::new() }, out);
                    }
                    if !call.arguments().is_empty() && self.open {
                        let partial_json = call.arguments().to_owned();
                        self.input.push_str(&partial_json);
                        out.push(Change::More(self.begun.len() - 1, More::InputJsonDelta { partial_json }));
                    }
                }
            }
        }
    }

    fn start(&mut self, block: Block, out: &mut Vec<Change>) {
        self.stop(out);
        out.push(Change::Start(self.begun.len(), block.clone()));
        self.begun.push(block);
        self.open = true;
    }

    fn stop(&mut self, out: &mut Vec<Change>) {
        if !std::mem::take(&mut self.open) {
            return;
        }
        let text = std::mem::take(&mut self.input);
        if let Some(Block::ToolUse { input, .. }) = self.begun.last_mut() {
            // That of a call which was cut off is no object, and is left out.
            *input = serde_json::from_str(&text).unwrap_or_default();
        }
        out.push(Change::Stop(self.begun.len() - 1));
    }
}
