//! Middleware that does not concern keys: CORS, the time limit of a body, panics, and a trace of each request.

pub(super) mod body_timeout;
pub(super) mod cors;
pub(super) mod panics;
pub(super) mod trace;
