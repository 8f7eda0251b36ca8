//! What one does with a checkpoint besides serving it: evaluate it on a text, and look inside.
//!
//! [`text`] cuts a file into documents, [`eval`] measures a model on them, [`inspect`] reports on the weights
//! (read through [`tensors`]) and on the gates and denominators that a text meets. The command line is `main.rs`;
//! nothing here prints.

pub mod eval;
pub mod inspect;
pub mod table;
pub mod tensors;
pub mod text;
