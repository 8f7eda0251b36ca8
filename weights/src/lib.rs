//! What one does with a checkpoint besides serving it: evaluate it on a text, look inside, and quantise it.
//!
//! [`text`] cuts a file into documents, [`eval`] measures a model on them, [`inspect`] reports on the weights and on
//! the gates and denominators that a text meets, [`quantize`] writes a copy with smaller weights and [`card`] what its
//! model card says of that. [`approximation`] and [`denominators`] are experiments, whose files ([`record`]) [`report`]
//! makes pictures and tables of. The command line is `main.rs`; nothing here prints.

pub mod approximation;
pub mod card;
pub mod cost;
pub mod denominators;
pub mod eval;
pub mod inspect;
pub mod quantize;
pub mod record;
pub mod report;
pub mod table;
pub mod text;
pub mod translate;
pub mod translation_cost;
