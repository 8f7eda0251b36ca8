//! The fast forms of each mixer, of bidirectional attention and of the sampler against plain references in f64.

#[path = "../common/mod.rs"]
mod common;

mod bidirectional;
mod forms_agree;
mod hybrid;
mod kernel_estimates;
mod randomized_attention;
mod sampling;
mod softmax;
