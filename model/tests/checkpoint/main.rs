//! Checkpoint folders: what loads, what is refused, and how GGUF is read.

#[path = "../common/mod.rs"]
mod common;

mod gguf;
mod loading;
