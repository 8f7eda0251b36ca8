//! The engine alone, on models that do as a test says.

#[path = "../common/mod.rs"]
mod common;

mod batch;
mod ends;
mod grammar;
mod logprobs;
mod moves;
mod prompts;
mod requests;
mod sources;
