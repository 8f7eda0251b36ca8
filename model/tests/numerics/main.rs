//! Compares the fast forms of each mixer with plain references in f64, and the sampler with candle's.

#[path = "../common/mod.rs"]
mod common;

mod forms_agree;
mod hybrid;
mod kernel_estimates;
mod sampling;
mod softmax;
