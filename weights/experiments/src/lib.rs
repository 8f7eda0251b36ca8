//! Attention experiments that the product does not depend on: how close random estimates come to softmax attention,
//! what bounds their parameters, and what each mixer costs.
//!
//! [`bidirectional`] has the estimators. [`approximation`], [`denominators`] and [`translation_cost`] measure, and
//! [`cost`] collects what `tidegate bench` measured. Each produces a [`record`], and [`report`] turns records into
//! plots and tables. The command line is `main.rs`; nothing here prints.

pub mod approximation;
pub mod bench;
pub mod bidirectional;
pub mod cost;
pub mod denominators;
pub mod plot;
pub mod record;
pub mod report;
mod scale;
mod svg;
pub mod translation_cost;
