//! Counts the allocations of a decode step, of refused snapshots and of changed models. This is a separate program that
//! runs one test at a time, because it counts every allocation of the process.

#[path = "../common/mod.rs"]
mod common;
#[path = "../../../model/tests/common/llamacpp.rs"]
mod llamacpp;
#[path = "../../../model/tests/common/pth.rs"]
mod pth;

mod files;
mod snapshots;
mod step;

use std::alloc::System;
use std::sync::{Mutex, MutexGuard, PoisonError};

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Waits until no other test runs, and makes others wait.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
