//! Model checks of the server's own files for leases, quotas, fairness between owners, and the queue of the index's
//! thread. Their unit tests run here in thousands of thread interleavings, and a deadlock is a failure too. In these
//! files, `crate::sync` is [`crate::sync`] of this test, not the server's. Tokio is assumed to be correct: each of its
//! operations is a single step here.

#![allow(dead_code, reason = "the rest of the server uses it")]

// The included files use these modules of the server as `super::error` and `super::id`.
use tidegate_server::session::{self as error, self as id};

#[path = "../../src/api/fair.rs"]
mod fair;
#[path = "../../src/session/lease.rs"]
mod lease;
#[path = "../../src/session/embedded/queue.rs"]
mod queue;
#[path = "../../src/api/auth/quota.rs"]
mod quota;
