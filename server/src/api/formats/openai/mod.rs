//! What OpenAI's formats have in common.

pub(in crate::api) mod answer;
mod conversation;
mod fields;
pub(super) mod grammar;
pub(super) mod logprobs;
pub(super) mod tools;
pub(in crate::api) mod wire;

pub(super) use self::conversation::TemplateFields;
pub(super) use self::fields::{invalid, openai_request, openai_turn};
