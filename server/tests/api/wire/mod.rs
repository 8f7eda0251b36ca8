//! OpenAI's two formats of text, field by field: how many texts, what is told of their tokens, where a text is cut,
//! what a stream looks like, and what no request can do.

mod boundaries;
mod choices;
mod echo;
mod extremes;
mod kit;
mod logprobs;
mod script;
mod streams;
