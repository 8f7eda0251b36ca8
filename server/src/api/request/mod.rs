//! The internal request: what any wire format asks for, validated once.

pub(super) mod choices;
pub(super) mod grammar;
pub(super) mod origin;
pub(super) mod prompt;
pub(super) mod tools;
pub(super) mod validate;
