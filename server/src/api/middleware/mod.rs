//! Middleware that does not concern keys: CORS and what else concerns browsers, limits on the head and the body,
//! panics, and a trace of each request.

pub(super) mod body_memory;
pub(super) mod body_timeout;
pub(super) mod browsers;
pub(super) mod cors;
pub(super) mod draining;
pub(super) mod head_size;
pub(super) mod hosts;
pub(super) mod panics;
pub(super) mod trace;
