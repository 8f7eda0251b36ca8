//! Types that are described and never made: the bodies that are read into other types, with fields of other servers
//! beside their own, and the answers that are put together from pieces. A test holds them to what is read and written.
#![allow(dead_code, clippy::large_enum_variant, reason = "they have schemas and no values")]
#![allow(clippy::enum_variant_names, clippy::struct_field_names, reason = "the names are those on the wire")]

mod answers;
mod dialects;
mod requests;
mod service;
mod sessions;

pub(super) use answers::{Chat, ChatChunk, Completion, CompletionChunk, ResponseEvent};
pub(super) use dialects::{
    AnthropicError, AnthropicEvent, AnthropicMessage, CountRequest, DetokenizeRequest, Detokenized, LlamaCompletion,
    LlamaCompletions, LlamaError, LlamaRequest, MessagesRequest, Props, Rendered, Slots, TemplateRequest, TokenCount,
    TokenizeRequest, Tokenized,
};
pub(super) use requests::{ChatRequest, CompletionRequest, ResponseRequest};
pub(super) use service::{Description, Error, Health, Model, Models};
pub(super) use sessions::{Appended, Deleted, ForkedSessions, Session, Sessions, Turns};
