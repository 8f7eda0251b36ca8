//! Tests of checkpoints: which ones load, which ones are refused, and how GGUF files are read.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/llamacpp.rs"]
mod llamacpp;
#[path = "../common/pth.rs"]
mod pth;

mod gguf;
mod hostile;
mod loading;
mod native;
mod whole;
