//! Tests of the session store, in a folder and in memory, and of snapshot files.

mod bounds;
mod concurrency;
mod crash;
mod faults;
mod kit;
mod lasting;
mod model;
mod sessions;
mod snapshot_sources;
mod snapshots;
