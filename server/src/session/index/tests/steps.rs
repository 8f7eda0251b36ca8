//! Random operations for the tests of an index.

use proptest::prelude::*;

/// An operation. The numbers select among everything that has ever existed.
#[derive(Clone, Debug)]
pub(super) enum Step {
    Create {
        owner: u8,
        from: Option<usize>,
        replace: Option<usize>,
        bytes: u8,
        ttl: Option<u8>,
        max: u8,
    },
    Commit {
        session: usize,
        expected: Option<usize>,
        bytes: u8,
        text: u8,
        forks: u8,
        max: u8,
        bounds: (u8, u8),
    },
    Rewind {
        session: usize,
        expected: Option<usize>,
        to: usize,
        bounds: (u8, u8),
    },
    Fork {
        session: usize,
        from: Option<usize>,
        n: u8,
        ttl: Option<u8>,
        max: u8,
    },
    Patch {
        session: usize,
        ttl: Option<u8>,
        label: Option<u8>,
    },
    Tag {
        session: usize,
        name: u8,
        version: Option<usize>,
        of: Option<u8>,
    },
    Untag {
        session: usize,
        name: u8,
    },
    Label {
        session: usize,
        version: usize,
        tag: Option<u8>,
        label: Option<u8>,
    },
    Delete(usize),
    Use(usize),
    Respond {
        owner: u8,
        parent: Option<usize>,
        bytes: u8,
        text: u8,
        ttl: u8,
    },
    Unrespond {
        owner: u8,
        response: usize,
    },
    Receipt {
        owner: u8,
        key: u8,
        ttl: u8,
    },
    Expire {
        after: u8,
        exempt: Option<usize>,
    },
    Prune,
    /// Frees `part` percent of what can be freed.
    Evict {
        owner: u8,
        part: u8,
        lineage: u8,
    },
    Forget(u8),
    Reopen,
}

/// Maximum number of sessions per owner: usually enough.
fn max() -> impl Strategy<Value = u8> {
    prop_oneof![1 => 0..4u8, 9 => Just(200)]
}

/// Rarely chooses something: a version other than the correct one, or a session to replace.
fn rarely() -> impl Strategy<Value = Option<usize>> {
    proptest::option::weighted(0.1, 0..1000usize)
}

fn kept_and_known() -> impl Strategy<Value = (u8, u8)> {
    (1..4u8, 0..5u8)
}

pub(super) fn step() -> impl Strategy<Value = Step> {
    use proptest::option::of;
    let (owner, some, few, bytes) = (0..2u8, 0..1000usize, 0..4u8, 0..9u8);
    let session = some.clone();
    prop_oneof![
        4 => (owner.clone(), of(some.clone()), rarely(), bytes.clone(), of(few.clone()), max()).prop_map(
            |(owner, from, replace, bytes, ttl, max)| Step::Create { owner, from, replace, bytes, ttl, max }
        ),
        12 => (session.clone(), rarely(), bytes.clone(), few.clone(), 0..3u8, max(), kept_and_known()).prop_map(
            |(session, expected, bytes, text, forks, max, bounds)| {
                Step::Commit { session, expected, bytes, text, forks, max, bounds }
            }
        ),
        12 => (session.clone(), rarely(), some.clone(), kept_and_known())
            .prop_map(|(session, expected, to, bounds)| Step::Rewind { session, expected, to, bounds }),
        3 => (session.clone(), of(some.clone()), 1..6u8, of(few.clone()), max())
            .prop_map(|(session, from, n, ttl, max)| Step::Fork { session, from, n, ttl, max }),
        1 => (session.clone(), of(few.clone()), of(few.clone()))
            .prop_map(|(session, ttl, label)| Step::Patch { session, ttl, label }),
        12 => (session.clone(), few.clone(), of(some.clone()), of(few.clone()))
            .prop_map(|(session, name, version, of)| Step::Tag { session, name, version, of }),
        1 => (session.clone(), few.clone()).prop_map(|(session, name)| Step::Untag { session, name }),
        1 => (session.clone(), some.clone(), of(few.clone()), of(few.clone()))
            .prop_map(|(session, version, tag, label)| Step::Label { session, version, tag, label }),
        1 => session.clone().prop_map(Step::Delete),
        1 => session.prop_map(Step::Use),
        2 => (owner.clone(), of(some.clone()), bytes, few.clone(), few.clone())
            .prop_map(|(owner, parent, bytes, text, ttl)| Step::Respond { owner, parent, bytes, text, ttl }),
        1 => (owner.clone(), some.clone()).prop_map(|(owner, response)| Step::Unrespond { owner, response }),
        1 => (owner.clone(), few.clone(), few.clone()).prop_map(|(owner, key, ttl)| Step::Receipt { owner, key, ttl }),
        1 => (few, of(some)).prop_map(|(after, exempt)| Step::Expire { after, exempt }),
        1 => Just(Step::Prune),
        6 => (owner, 0..110u8, 0..3u8).prop_map(|(owner, part, lineage)| Step::Evict { owner, part, lineage }),
        1 => any::<u8>().prop_map(Step::Forget),
        1 => Just(Step::Reopen),
    ]
}
