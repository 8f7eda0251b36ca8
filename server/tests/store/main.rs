//! Tests of the session store, both in a folder and in memory, and of snapshot files.

mod bounds;
mod branches;
mod concurrency;
mod crash;
mod damage;
mod faults;
mod faulty;
mod faulty_model;
#[path = "../common/fuzz.rs"]
mod fuzz;
mod interleaved;
mod kit;
mod lasting;
mod maintenance;
mod model;
mod models;
mod pages;
mod power;
mod sessions;
mod sim;
mod sim_objects;
mod snapshot_fuzz;
mod snapshot_sources;
mod snapshot_text;
mod snapshots;
mod sync;
mod texts;
mod turn_forks;
mod upkeep;

// The files that `models` includes use this as `crate::session`.
use tidegate_server::session;
