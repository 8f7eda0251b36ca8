//! `POST /v1/chat/completions` in OpenAI's format: messages in, one message or several out.

mod encoder;
mod message;
mod wire;

pub(in crate::api) use self::encoder::{Chat, ChatChunk};
pub(in crate::api) use self::wire::ChatRequest;
pub(in crate::api::formats) use self::wire::DEFAULT_MAX_TOKENS;
