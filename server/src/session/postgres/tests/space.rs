//! Budgets that several servers share.

use super::*;
use crate::session::index::{NewReceipt, Shortfall};

const LIMITS: Limits = Limits { disk: 1500, owner: 1000 };

#[test]
fn a_budget_that_another_server_has_used_is_not_exceeded() {
    with_schema(async |schema| {
        let options = PostgresOptions { limits: LIMITS, ..schema.options() };
        let (one, two) = (Schema::open_with(options.clone()).await, Schema::open_with(options).await);
        let (id, (row, _)) = create(&one, 600, None).await;
        // The second server does not know of the session yet.
        assert!(two.capacity().fits(OWNER, 900, LIMITS).is_ok());
        let found = |found| StoreError::Quota { quota: "bytes of snapshots and texts", bound: 1000, found };
        let second = new_session(OWNER, 500, None);
        assert_eq!(two.create(second.clone()).await.map(drop), Err(found(1100)));
        assert_eq!(two.session(OWNER, &second.id).await, Err(StoreError::SESSION));
        // Now it does.
        while two.capacity().fits(OWNER, 500, LIMITS) != Err(Shortfall::Owner { missing: 100, found: 1100 }) {
            tokio::task::yield_now().await;
        }
        let receipt = NewReceipt { key: "key".to_owned(), now: NOW, ends: NOW, answer: vec![0; 200] };
        assert_eq!(two.put_receipt(OWNER, receipt).await, Err(found(1059)));
        // The disk limit counts the first owner's garbage.
        let other = |bytes| new_session(Owner([2; 16]), bytes, None);
        let full = |missing| {
            let reason = format!("snapshots and texts may take 1500 bytes in all, and {missing} more are needed");
            Err(StoreError::Full { reason })
        };
        assert_eq!(one.create(other(950)).await.map(drop), full(50));
        one.delete(OWNER, &id).await.expect("it is removed");
        assert_eq!(two.create(other(950)).await.map(drop), full(50));
        one.forget_garbage(vec![VersionId::parse(&row.head).expect("an id")]).await.expect("it is forgotten");
        two.create(other(950)).await.expect("there is space");
        // A request that frees space is never refused.
        assert_eq!(two.expire(NOW, none()).await, Ok(0));
    });
}

#[test]
fn a_server_learns_what_another_has_stored_and_keeps_its_reservations() {
    with_schema(async |schema| {
        let options = PostgresOptions { refresh: Duration::from_millis(5), ..schema.options() };
        let (one, two) = (schema.open().await, Schema::open_with(options).await);
        let reserved = two.capacity().reserve(OWNER, 50, NO_LIMITS).expect("there is space");
        let (id, (row, _)) = create(&one, 600, None).await;
        one.commit(turn(&id, &row.head, 70)).await.expect("a turn");
        let known =
            || two.capacity().totals(|totals| (totals.live, totals.sessions, totals.evictable.contains(&OWNER)));
        while known() != (670, 1, true) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!((two.capacity().reserved(), two.capacity().ranked()), (50, vec![(720, OWNER)]));
        drop(reserved);
        assert_eq!(two.capacity().ranked(), vec![(670, OWNER)]);
    });
}

#[test]
fn last_uses_of_two_servers_do_not_replace_each_other() {
    with_schema(async |schema| {
        let (one, two) = (schema.open().await, schema.open().await);
        let (id, (row, _)) = create(&one, 1, Some(10)).await;
        two.record_uses([(id.clone(), NOW + 9000)].into()).await.expect("it is recorded");
        // An earlier use, and a turn by a server whose clock is behind.
        one.record_uses([(id.clone(), NOW + 2000)].into()).await.expect("it is recorded");
        one.commit(turn(&id, &row.head, 1)).await.expect("a turn");
        assert_eq!(two.session(OWNER, &id).await.expect("the session").used, NOW + 9000);
        assert_eq!(one.can_sweep(NOW + 18_999, none()).await, Ok(false));
        assert_eq!(one.can_sweep(NOW + 19_000, none()).await, Ok(true));
    });
}

#[test]
fn of_two_owners_each_loses_what_is_beyond_its_share() {
    with_schema(async |schema| {
        let (index, other) = (schema.open().await, Owner([2; 16]));
        let mut sessions = Vec::new();
        for (owner, turns) in [(OWNER, 2), (other, 1)] {
            let create = new_session(owner, 100, None);
            let (mut row, _) = index.create(create.clone()).await.expect("a session");
            for _ in 0..turns {
                let of = turn(&create.id, &row.head, 100);
                let bounds = Bounds { keep: 9, lineage: 9 };
                let commit = Commit { owner, version: version(owner, Some(&of.expected), 100), bounds, ..of };
                row = index.commit(commit).await.expect("a turn").0;
            }
            sessions.push((owner, create.id));
        }
        // Both owners would then use 300 bytes, and may use 225.
        let victims = index.capacity().victims(other, 100, 150);
        assert_eq!(index.can_evict(victims.clone(), 301).await, Ok(false));
        assert_eq!(index.evict(victims.clone(), 301, 9).await, Ok(None));
        assert_eq!(index.evict(victims, 150, 9).await, Ok(Some(2)));
        let mut kept = Vec::new();
        for (owner, id) in &sessions {
            let versions = index.versions(*owner, id).await.expect("the session").1;
            kept.push(versions.into_iter().map(|version| version.kept).collect::<Vec<_>>());
        }
        assert_eq!(kept, [vec![false, true, true], vec![false, true]]);
    });
}
