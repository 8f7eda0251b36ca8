//! Claims on objects that no version has, and commits that come too late.

use std::collections::BTreeSet;

use futures_util::future::join;

use super::*;

fn too_late<T>() -> Result<T, StoreError> {
    Err(StoreError::Unavailable { reason: "its snapshot was removed, because its upload took too long".to_owned() })
}

#[test]
fn the_first_of_a_claim_and_a_commit_wins() {
    with_schema(async |schema| {
        let (one, two) = (schema.open().await, schema.open().await);
        let (id, (row, _)) = create(&one, 1, None).await;
        let late = turn(&id, &row.head, 5);
        let claimed = vec![late.version.id.clone()];
        assert_eq!(two.orphans(claimed.clone()).await, Ok(claimed.clone()));
        // Nothing of the commit is stored, and the object stays claimed.
        assert_eq!(one.commit(late.clone()).await, too_late());
        assert_eq!(one.session(OWNER, &id).await, Ok(row.clone()));
        assert_eq!(one.version(OWNER, &late.version.id).await, Ok(None));
        assert_eq!(one.orphans(claimed.clone()).await, Ok(claimed));
        let mut head = row.head;
        for _ in 0..3 {
            let in_time = turn(&id, &head, 5);
            head = in_time.version.id.to_string();
            one.commit(in_time.clone()).await.expect("nobody has claimed it");
            assert_eq!(two.orphans(vec![in_time.version.id]).await, Ok(Vec::new()));
        }
        // Garbage is not claimed, because it is removed separately.
        let garbage = two.garbage(9).await.expect("the index is read");
        assert_eq!(garbage.len(), 2);
        assert_eq!(two.orphans(garbage.clone()).await, Ok(Vec::new()));
        two.forget_garbage(garbage.clone()).await.expect("it is forgotten");
        let orphans = two.orphans(garbage.clone()).await.expect("the index is read");
        assert_eq!(BTreeSet::from_iter(orphans), BTreeSet::from_iter(garbage));
    });
}

#[test]
fn of_a_claim_and_a_commit_at_the_same_time_one_wins() {
    with_schema(async |schema| {
        let (one, two) = (schema.open().await, schema.open().await);
        let (id, (row, _)) = create(&one, 1, None).await;
        let mut head = row.head;
        for round in 0..40 {
            let commit = turn(&id, &head, 5);
            let version = commit.version.id.clone();
            let claim = two.orphans(vec![version.clone()]);
            let (done, claimed) = if round % 2 == 0 {
                join(one.commit(commit), claim).await
            } else {
                let (claimed, done) = join(claim, one.commit(commit)).await;
                (done, claimed)
            };
            let claimed = claimed.expect("the index is asked");
            match done {
                Ok((row, _)) => {
                    head = row.head;
                    assert_eq!((head.as_str(), claimed), (version.as_str(), Vec::new()));
                }
                refused => assert_eq!((refused, claimed), (too_late(), vec![version])),
            }
        }
    });
}
