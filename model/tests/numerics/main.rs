//! The fast forms of each mixer and the sampler against plain references in f64.

#[path = "../common/mod.rs"]
mod common;

mod forms_agree;
mod hybrid;
mod kernel_estimates;
mod sampling;
mod softmax;
