//! A client's notes on a session, and the changes that it may make to one.

use std::collections::BTreeMap;
use std::time::Duration;

/// A client's own notes on a session.
pub type Metadata = BTreeMap<String, String>;

/// Changes to a session; `None` leaves a value as it is.
#[derive(Clone, Debug, Default)]
pub struct Patch {
    /// The new notes, replacing all old ones.
    pub metadata: Option<Metadata>,
    /// How long it is kept after its last use; `Some(None)`: for ever.
    pub ttl: Option<Option<Duration>>,
    /// The new label of the head; `Some(None)`: none.
    pub label: Option<Option<String>>,
}
