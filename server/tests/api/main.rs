//! Tests of the HTTP API, in one binary so that they share the server's build and the loaded model.

#[path = "../common/mod.rs"]
mod common;

mod http;
#[cfg(feature = "cuda-emulator")]
mod on_cuda;
#[path = "../../../model/tests/common/candle.rs"]
mod published;

#[path = "../../../model/tests/common/llamacpp.rs"]
mod llamacpp;
mod metrics;
mod openapi;
mod serving;
mod tls;
mod wire;
