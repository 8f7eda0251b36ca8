//! Tests of the engine, of chat templates and of grammars.

#[path = "../common/mod.rs"]
mod common;

mod batch;
mod chat_templates;
mod draft_model;
mod drafts;
mod ends;
mod fairness;
mod forced;
mod fuzz;
mod grammar;
mod grammars;
mod logprobs;
mod prompts;
mod requests;
mod resume;
mod shares;
mod sources;
mod transfers;
