//! Tests of the `tidegate` program as a process: commands, flags, signals, messages, and the playground in a browser.

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
