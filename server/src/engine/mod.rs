//! Continuous batching: one thread that owns the model and its slots, and takes all running rows a token at a time.
//!
//! It knows no HTTP and no wire type. Requests come in checked ([`Request`]) through a bounded queue, text goes out
//! as [`Event`]s. Between two decode steps at most one chunk of one prompt is read, so that nobody's stream stalls; a
//! state that moves between device and host holds up its own request alone.

mod arrival;
mod constraint;
mod ends;
mod event;
mod grammar;
mod guarded;
mod guide;
mod handle;
mod inbox;
mod keep;
mod moves;
mod opening;
mod outlet;
mod request;
mod scheduler;
mod scores;
mod sequence;
mod shared;
mod stats;
mod step;
mod worker;

pub use constraint::{Constraint, ConstraintError, Grammar};
pub use event::{
    Delta, Event, EventStream, Failure, Finish, FinishReason, Interrupt, StopCause, Timings, TokenLogprobs,
};
pub use handle::{EngineHandle, EngineThread};
pub use inbox::SubmitError;
pub(crate) use opening::last_tokens;
pub use request::{Keep, Limits, Request, RequestError, RequestParameters, Sources, Start, recommended_sampling};
pub use sequence::{Encode, TextRules};
pub use shared::share_prompt;
pub use stats::{ROWS_BOUNDS, Stats};
pub use worker::{EngineError, EngineOptions, spawn};
