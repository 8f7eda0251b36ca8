//! The blocks of a message that is being generated: its thinking, its text, and its tool calls.

use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::api::run::answer::AnswerSplitter;
use crate::api::run::tool_calls::Piece;

/// A block, whole or as it begins.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = AnthropicBlock)]
pub(in crate::api) enum Block {
    Thinking {
        thinking: String,
        /// Always empty: nothing is signed.
        signature: String,
    },
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

/// A piece of a block.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(tag = "type")]
#[schema(as = AnthropicDelta)]
pub(in crate::api) enum BlockDelta {
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: String },
    #[serde(rename = "text_delta")]
    Text { text: String },
    #[serde(rename = "input_json_delta")]
    InputJson { partial_json: String },
}

/// A change to the block at an index.
#[derive(Debug)]
pub(super) enum Change {
    Start(usize, Block),
    Delta(usize, BlockDelta),
    Stop(usize),
}

/// The blocks of one message.
#[derive(Debug)]
pub(super) struct Blocks {
    splitter: AnswerSplitter,
    all: Vec<Block>,
    /// The input of the last block as JSON text, if the block is a tool call.
    input: String,
    open: bool,
}

impl Blocks {
    pub(super) fn new(splitter: AnswerSplitter) -> Self {
        Self { splitter, all: Vec::new(), input: String::new(), open: false }
    }

    /// Begins the message. If it can hold only text, its block starts at once.
    pub(super) fn open(&mut self, out: &mut Vec<Change>) {
        if self.splitter.is_text() {
            self.start(Block::Text { text: String::new() }, out);
        }
    }

    /// Adds generated text to the message.
    pub(super) fn push(&mut self, text: &str, out: &mut Vec<Change>) {
        let pieces = self.splitter.push(text);
        self.take(pieces, out);
    }

    /// Ends the message.
    pub(super) fn finish(&mut self, out: &mut Vec<Change>) {
        let pieces = self.splitter.finish();
        self.take(pieces, out);
        // Clients expect a text block, even an empty one.
        if self.splitter.ends_with_text() && !matches!(self.all.last(), Some(Block::Text { .. })) {
            self.start(Block::Text { text: String::new() }, out);
        }
        self.stop(out);
    }

    /// Whether the message consists of one or more complete tool calls.
    pub(super) fn has_called(&self) -> bool {
        self.splitter.has_called()
    }

    /// Returns all blocks. Call [`Self::finish`] first.
    pub(super) fn all(&self) -> &[Block] {
        &self.all
    }

    fn take(&mut self, pieces: Vec<Piece>, out: &mut Vec<Change>) {
        for piece in pieces {
            match piece {
                Piece::Reasoning(thinking) => {
                    if !matches!(self.all.last(), Some(Block::Thinking { .. })) {
                        self.start(Block::Thinking { thinking: String::new(), signature: String::new() }, out);
                    }
                    if let Some(Block::Thinking { thinking: whole, .. }) = self.all.last_mut() {
                        whole.push_str(&thinking);
                    }
                    out.push(Change::Delta(self.all.len() - 1, BlockDelta::Thinking { thinking }));
                }
                Piece::Text(text) => {
                    if !matches!(self.all.last(), Some(Block::Text { .. })) {
                        self.start(Block::Text { text: String::new() }, out);
                    }
                    if let Some(Block::Text { text: whole }) = self.all.last_mut() {
                        whole.push_str(&text);
                    }
                    out.push(Change::Delta(self.all.len() - 1, BlockDelta::Text { text }));
                }
                Piece::CallStart { id, name, .. } => self.start(Block::ToolUse { id, name, input: Map::new() }, out),
                Piece::Arguments { text: partial_json, .. } => {
                    self.input.push_str(&partial_json);
                    out.push(Change::Delta(self.all.len() - 1, BlockDelta::InputJson { partial_json }));
                }
            }
        }
    }

    fn start(&mut self, block: Block, out: &mut Vec<Change>) {
        self.stop(out);
        out.push(Change::Start(self.all.len(), block.clone()));
        self.all.push(block);
        self.open = true;
    }

    fn stop(&mut self, out: &mut Vec<Change>) {
        if !std::mem::take(&mut self.open) {
            return;
        }
        let text = std::mem::take(&mut self.input);
        if let Some(Block::ToolUse { input, .. }) = self.all.last_mut() {
            // If a call was cut off, its input is not valid JSON and is left empty.
            *input = serde_json::from_str(&text).unwrap_or_default();
        }
        out.push(Change::Stop(self.all.len() - 1));
    }
}
