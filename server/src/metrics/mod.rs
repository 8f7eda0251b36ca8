//! Metrics: counters and times that are updated without locks while tokens are generated, and rendered for scrapers.
//!
//! Names follow vLLM's where it has one, with `tidegate_` instead of `vllm:`, so that its dashboards need only that
//! change. Figures of the engine, the store and the system are read at each scrape.

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
