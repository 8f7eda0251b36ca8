//! Authentication and authorization: API keys, their scopes and quotas, and the owner that a request acts for.

pub(super) mod context;
pub(super) mod keys;
pub(super) mod middleware;
pub(super) mod owner;
mod quota;
pub(super) mod scope;
