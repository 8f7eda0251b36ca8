//! Chat templates: they turn messages into the text that a model reads.

mod jinja;
mod message;
mod sources;
mod template;
mod world;

pub use message::{ChatError, Message, TemplateInput};
pub use sources::{TOOL_TEMPLATE, TemplateSource, TemplateSources};
pub use template::{After, ChatTemplate};
