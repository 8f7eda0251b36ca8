//! The HTTP API in one program: every test file links the same server and loads the same model.

#[path = "../common/mod.rs"]
mod common;

#[cfg(feature = "cuda-emulator")]
mod emulated;
mod http;
mod metrics;
mod openapi;
mod serving;
mod tls;
mod wire;
