//! Tests of the checkpoint tools, one module for each subject.

mod cli;
mod common;
mod encoder_decoder;
mod eval;
mod inspect;
mod quantize;
mod text;
mod translate;
