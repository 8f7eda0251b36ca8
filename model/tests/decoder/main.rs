//! What every decoder promises, whatever mixes its tokens, and the golden logits that PyTorch wrote.

#[path = "../common/mod.rs"]
mod common;

mod decoder;
mod golden;
mod half_states;
mod hostile_states;
mod hybrid_decoder;
mod seq2seq;
