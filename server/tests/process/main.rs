//! The `tidegate` program as a process: its commands, flags, signals and messages, and its page in a real browser.

#[path = "../live/mod.rs"]
mod live;

mod bench;
mod command;
mod crash;
mod device;
mod locked;
mod playground;
#[cfg(feature = "otlp")]
mod telemetry;
