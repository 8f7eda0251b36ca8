//! Tests of whole decoders: properties of every mixer, and agreement with other implementations.

#[path = "../common/mod.rs"]
mod common;

#[path = "../common/candle.rs"]
mod published;

mod candle;
mod candle_reference;
mod digests;
mod drafts;
mod drift;
mod golden;
mod hybrid;
mod mamba2;
mod portable;
mod promises;
mod recurrent_gemma;
mod reference;
mod rfa;
mod rwkv7;
mod seq2seq;
mod softmax;
mod table;
