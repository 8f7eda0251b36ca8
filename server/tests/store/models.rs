//! The server's own files on leases, quotas, turns between owners and the queue of the index's thread, under a model of
//! concurrency. Their unit tests run here in thousands of orders of their threads; a deadlock fails them too. In these
//! files, `crate::sync` is [`crate::sync`] of this test and not the server's. What tokio provides is taken as correct: its
//! operations are single steps here.

#![allow(dead_code, reason = "the rest of the server uses it")]

// The files name what is beside them in the server.
use tidegate_server::session::{self as error, self as id};

#[path = "../../src/api/fair.rs"]
mod fair;
#[path = "../../src/session/lease.rs"]
mod lease;
#[path = "../../src/session/embedded/queue.rs"]
mod queue;
#[path = "../../src/api/auth/quota.rs"]
mod quota;
