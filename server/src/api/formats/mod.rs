//! The wire formats: one folder for each. A format reads its own request bodies and writes its own responses, events and
//! errors; everything between is the same for all.

pub(super) mod anthropic;
pub(super) mod chat;
pub(super) mod completions;
pub(super) mod errors;
pub(super) mod foreign;
pub(super) mod llamacpp;
pub(super) mod numbers;
pub(super) mod openai;
pub(super) mod responses;
pub(super) mod tokens;
pub(super) mod unsupported;
