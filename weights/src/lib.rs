//! What one does with a checkpoint besides serving it: evaluate it on a text, look inside, and quantise it.
//!
//! [`text`] cuts a file into documents, [`eval`] measures a model on them, [`inspect`] reports on the weights and on
//! the gates and denominators that a text meets, [`quantize`] writes a copy with smaller weights and [`card`] what its
//! model card says of that. The command line is `main.rs`; nothing here prints.

pub mod card;
pub mod eval;
pub mod inspect;
pub mod quantize;
pub mod table;
pub mod text;
