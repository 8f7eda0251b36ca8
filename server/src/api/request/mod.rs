//! The internal request: what every wire format asks for, in one type that does not depend on any wire format.
//!
//! A format builds a [`TextRequest`]; [`TextRequest::validate`] turns it into requests for the engine. Validation
//! checks what concerns the request as a whole: its prompts, the number of texts, their total size, its conversation.
//! The parameters of a single text are checked only by `engine::Request::new`, which validation calls.

pub(super) mod blocking;
pub(super) mod choices;
pub(super) mod continuation;
pub(super) mod encode;
pub(super) mod grammar;
pub(super) mod identity;
mod listing;
pub(super) mod messages;
mod names;
pub(super) mod prompt;
pub(super) mod recorder;
pub(super) mod sampling;
pub(super) mod start;
pub(super) mod tools;
pub(super) mod validate;

pub(super) use self::names::ParameterNames;
pub(super) use self::validate::{MaxTokens, TextRequest, ValidRequest};
