//! OpenAI's completions and chat formats, field by field: number of texts, log probabilities, boundaries, streams, and
//! invalid requests.

mod boundaries;
mod choices;
mod echo;
mod extremes;
mod fuzz;
mod kit;
mod logprobs;
mod script;
mod streams;
