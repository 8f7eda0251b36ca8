//! Types that are described and never made: the bodies that are read into other types, with fields of other servers
//! beside their own, and the answers that are put together from pieces. A test holds them to what is read and written.
#![allow(dead_code, clippy::large_enum_variant, reason = "they have schemas and no values")]
#![allow(clippy::enum_variant_names, clippy::struct_field_names, reason = "the names are those on the wire")]

mod answers;
mod dialects;
mod requests;

pub(in crate::api) use answers::{Chat, ChatChunk, Completion, CompletionChunk, ResponseEvent};
pub(in crate::api) use dialects::{
    AnthropicError, AnthropicEvent, AnthropicMessage, CountRequest, DetokenizeRequest, Detokenized, LlamaCompletion,
    LlamaCompletions, LlamaError, LlamaRequest, MessagesRequest, Props, Rendered, Slots, TemplateRequest, TokenCount,
    TokenizeRequest, Tokenized,
};
pub(in crate::api) use requests::{ChatRequest, CompletionRequest, ResponseRequest};
