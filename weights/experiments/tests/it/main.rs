//! Tests of the experiments, one module for each subject.

mod approximation;
mod bidirectional;
mod cost;
mod plot;
mod randomized_attention;
mod report;
mod translation_cost;
