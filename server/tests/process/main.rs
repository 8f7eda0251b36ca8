//! Tests of the `tidegate` program as a process: commands, flags, signals, messages, and the playground in a browser.

#[path = "../live/mod.rs"]
mod live;
#[path = "../common/random.rs"]
#[allow(dead_code, reason = "each test binary uses its own part")]
mod random;

mod admin;
mod alone;
mod bench;
mod chat;
mod command;
mod crash;
mod device;
mod drafts;
mod eval;
mod fairness;
mod hub;
mod locked;
mod logs;
mod memory;
mod models;
mod permissions;
mod playground;
mod shutdown;
#[cfg(feature = "otlp")]
mod telemetry;
