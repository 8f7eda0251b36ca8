//! A client's metadata on a session, and the changes that a client may make to a session.

use std::collections::BTreeMap;
use std::time::Duration;

/// A client's own notes on a session, as pairs of a key and a value.
pub type Metadata = BTreeMap<String, String>;

/// Changes to a session; `None` leaves a value as it is.
#[derive(Clone, Debug, Default)]
pub struct Patch {
    /// The new metadata, which replaces all of the old.
    pub metadata: Option<Metadata>,
    /// How long the session is kept after its last use; `Some(None)` means forever.
    pub ttl: Option<Option<Duration>>,
    /// The new label of the head; `Some(None)` removes it.
    pub label: Option<Option<String>>,
}
