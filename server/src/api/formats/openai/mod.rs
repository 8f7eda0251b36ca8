//! What OpenAI's formats have in common.

pub(in crate::api) mod answer;
mod fields;
pub(super) mod grammar;
pub(super) mod logprobs;
pub(super) mod tools;
pub(in crate::api) mod wire;

pub(super) use self::fields::{invalid, neutral, openai_request};
