//! Chat templates: they turn messages into the text that a model reads.

mod jinja;
mod message;
mod template;

pub use message::{ChatError, Message};
pub use template::{After, ChatTemplate};
