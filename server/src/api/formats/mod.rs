//! The wire formats, one folder for each. A format converts its own request bodies to the internal request, and the
//! events of a run to its own responses.

pub(super) mod anthropic;
pub(super) mod chat;
pub(super) mod completions;
mod content;
pub(super) mod errors;
pub(super) mod format;
pub(super) mod json;
pub(super) mod llamacpp;
mod numbers;
pub(super) mod openai;
pub(super) mod responses;
pub(super) mod tokens;
mod unsupported;
