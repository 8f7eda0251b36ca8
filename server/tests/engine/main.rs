//! The engine on models that do what a test says, and the text it reads and writes: chat templates and grammars.

#[path = "../common/mod.rs"]
mod common;

mod batch;
mod chat_templates;
mod ends;
mod grammar;
mod grammars;
mod logprobs;
mod moves;
mod prompts;
mod requests;
mod sources;
