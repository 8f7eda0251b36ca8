//! Checkpoints: what loads, what is refused, and how GGUF is read.

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
