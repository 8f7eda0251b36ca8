//! Metrics: counters and durations that are updated without locks during generation, and rendered for scrapers.
//!
//! Metrics have the names that vLLM uses, where it has the metric, with `tidegate_` instead of `vllm:`. So its
//! dashboards need only that change. Values of the engine, the store and the system are read at each scrape.

mod exposition;
mod gather;
mod histogram;
mod labels;
mod meter;
mod process;
mod registry;

pub(crate) use exposition::{CLASSIC, OPEN_METRICS};
pub(crate) use gather::{Member, Model, Sources, Stored};
pub(crate) use labels::{ErrorLabels, HttpLabels};
pub(crate) use meter::Meter;
pub(crate) use registry::{Accepted, AcceptedTurn, Metrics};
