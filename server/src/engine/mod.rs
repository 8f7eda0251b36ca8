//! Continuous batching: one thread owns the model and its slots, and advances all running rows by one token at a time.
//!
//! The engine does not know HTTP or any wire type. Validated requests ([`Request`]) come in through a bounded queue,
//! and text goes out as [`Event`]s. Between two decode steps the engine reads at most one chunk of one prompt, so that
//! no stream stalls. While a state is copied between device and host, only its own request waits.
//!
//! If a step has few rows, they may also read draft tokens (`speculation`), which are kept if the request's sampler
//! chooses them too.

mod accuracy;
mod chunks;
mod constraint;
mod draft_model;
mod drafter;
mod drafters;
mod error;
mod event;
mod event_sender;
mod forced;
mod generation;
mod guide;
mod handle;
mod logprobs;
mod lookup;
mod output;
mod parameters;
mod pass_costs;
mod prefill;
mod prefill_order;
mod prompt;
mod queue;
mod request;
mod resume;
mod rollback;
mod row_drafts;
mod run;
mod scheduler;
mod sequence;
mod shares;
mod snapshots;
mod speculation;
mod stats;
mod step;
mod submission;
mod tenants;
mod text_rules;
mod transfers;
mod worker;

pub use constraint::{Constraint, ConstraintError, Grammar};
pub use draft_model::{DRAFT_SLOTS, DraftModel};
pub use drafter::{Drafter, PROPOSAL_KINDS, Proposal};
pub use drafters::Drafters;
pub use event::{
    Delta, Event, EventStream, Failure, Finish, FinishReason, Interrupt, StopCause, Timings, TokenLogprobs,
};
pub use handle::{EngineHandle, EngineThread};
pub use parameters::{
    Keeper, Limits, RequestError, RequestParameters, Sources, Start, TakeSnapshots, recommended_sampling,
};
pub use pass_costs::{PassCost, PassCosts};
pub use prompt::Begun;
pub(crate) use prompt::last_tokens;
pub use queue::SubmitError;
pub use request::{Request, share_prompt};
pub use row_drafts::DraftCounts;
pub use run::{DRAFT_MAX, EngineError, EngineOptions, spawn, spawn_with};
pub use speculation::MOST_TOKENS;
pub use stats::{ROWS_BOUNDS, Stats};
pub use tenants::Tenant;
pub use text_rules::TextRules;
