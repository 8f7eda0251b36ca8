//! Tests of the engine with scripted models, and of chat templates and grammars.

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
