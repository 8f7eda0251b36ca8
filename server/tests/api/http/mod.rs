//! The HTTP API, route by route.

mod anthropic;
mod async_openai;
mod completions;
mod continuation;
mod disconnects;
mod forks;
mod grammar_answers;
mod isolation;
mod keys;
mod limits;
mod llamacpp;
mod mixer_sessions;
mod quantised;
mod quotas;
mod refusals;
mod responses;
mod sessions;
mod split_characters;
mod stored_responses;
mod tokens;
mod tools;
mod translation;
mod translation_model;
