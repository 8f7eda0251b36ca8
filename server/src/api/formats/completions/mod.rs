//! `POST /v1/completions` in OpenAI's format: prompts in, texts out.

mod echo;
mod encoder;
mod wire;

pub(in crate::api) use self::encoder::{Completion, CompletionChunk};
pub(in crate::api) use self::wire::CompletionRequest;
