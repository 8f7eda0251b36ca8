//! Tools for checkpoints: evaluate one on a text, inspect it, quantize it, and translate with it.
//!
//! [`text`] splits a file into documents, [`eval`] measures a model on them, [`inspect`] reports on the weights and on
//! the gates and denominators for a text, [`quantize`] writes a copy with smaller weights, and [`translate`] runs an
//! encoder-decoder. [`terminal`] has tables and progress bars. The command line is `main.rs`; nothing here prints.

pub mod eval;
pub mod inspect;
pub mod quantize;
pub mod terminal;
pub mod text;
pub mod translate;
