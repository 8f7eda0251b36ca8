//! The Tidegate text-generation server.

pub mod engine;
pub mod text;
