//! What the server's tests share.
#![allow(dead_code, reason = "each test binary uses its own part")]

pub mod fake;
