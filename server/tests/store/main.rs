//! The session store, on a folder and in memory: what it keeps, refuses, drops and survives; and snapshot files.

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
