//! The store of sessions, on a folder and in memory: what it keeps, refuses, drops and survives.

mod bounds;
mod concurrency;
mod crash;
mod faults;
mod kit;
mod lasting;
mod model;
mod sessions;
