//! What decoders promise, over the table of mixers, and the golden logits that PyTorch wrote.

#[path = "../common/mod.rs"]
mod common;

mod golden;
mod hybrid;
mod promises;
mod rfa;
mod seq2seq;
mod softmax;
mod table;
