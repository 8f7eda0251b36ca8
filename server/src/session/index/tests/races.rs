//! Concurrent requests of which only one may succeed.

use futures_util::future::{BoxFuture, join_all};

use super::*;

/// Number of requests that start at the same time.
const RACERS: u8 = 20;

/// The sessions in races keep all versions.
const BOUNDS: Bounds = Bounds { keep: 999, lineage: 999 };

/// Runs races for an owner's last session, for an idempotency key, and for a session's head, between two servers if
/// they can share the index.
pub(crate) fn excludes<O: AsyncFn() -> Arc<dyn Index>>(start: impl Fn() -> O) {
    crate::sync::block_on(async {
        let open = start();
        let mut world = World::new(open().await);
        if world.index.is_shared() {
            world.other = open().await;
        }
        let session = world.race_for_the_last_session().await;
        world.race_for_a_key(&session).await;
        world.race_for_the_head(&session).await;
        world.index.close().await.expect("the index closes");
        if world.index.is_shared() {
            world.other.close().await.expect("the index closes");
        }
    });
}

impl World {
    /// Returns the server for one of several requests.
    fn server(&self, number: usize) -> &Arc<dyn Index> {
        if number.is_multiple_of(2) { &self.index } else { &self.other }
    }

    /// Makes a version without reservations, because reservations belong to one server.
    fn unreserved(&mut self, parent: Option<&VersionId>) -> NewVersion {
        NewVersion { reserved: Vec::new(), ..self.new_version(owner(0), parent, 1, 0) }
    }

    fn new_session(&mut self, max_sessions: usize, receipt: Option<NewReceipt<Answer>>) -> Create {
        let version = self.unreserved(None);
        let row = SessionRow::new(owner(0), version.id.as_str(), None, self.now);
        Create { id: self.new_session_id(), row, version: Some(version), replace: false, max_sessions, receipt }
    }

    fn turn(&mut self, session: &SessionId, expected: &VersionId) -> Commit {
        Commit {
            owner: owner(0),
            session: session.clone(),
            expected: expected.clone(),
            version: self.unreserved(Some(expected)),
            forks: Vec::new(),
            max_sessions: 1,
            bounds: BOUNDS,
            now: self.now,
            receipt: None,
        }
    }

    async fn head(&self, session: &SessionId) -> VersionId {
        VersionId::parse(&self.index.session(owner(0), session).await.expect("the session").head).expect("an id")
    }

    async fn race_for_the_last_session(&mut self) -> SessionId {
        let creates: Vec<_> = (0..RACERS).map(|_| self.new_session(1, None)).collect();
        let ends = join_all((0..).zip(&creates).map(|(n, create)| self.server(n).create(create.clone()))).await;
        let created: Vec<_> = ends.into_iter().filter_map(Result::ok).collect();
        let [(row, _)] = created.as_slice() else { panic!("{} sessions were created", created.len()) };
        let sessions = self.index.list(owner(0), None, false, 9).await.expect("the index is read");
        let [(session, (found, _))] = sessions.as_slice() else { panic!("{sessions:?}") };
        assert_eq!(found, row);
        session.clone()
    }

    /// Sends the same request to several servers: one creates a session or forks, and the others find its receipt.
    async fn race_for_a_key(&mut self, session: &SessionId) {
        let receipt = |key: &str, now| NewReceipt { key: key.to_owned(), now, ends: now + TICK, answer: answer() };
        let receipt_at = self.now;
        let creates: Vec<_> = (0..RACERS).map(|_| self.new_session(99, Some(receipt("create", receipt_at)))).collect();
        let ends = join_all((0..).zip(&creates).map(|(n, create)| self.server(n).create(create.clone()))).await;
        assert_eq!(ends.iter().filter(|end| end.is_ok()).count(), 1, "{ends:?}");
        assert_eq!(ends.iter().filter(|end| **end == Err(StoreError::Answered)).count(), usize::from(RACERS) - 1);
        let forks: Vec<_> = (0..RACERS)
            .map(|_| Fork {
                owner: owner(0),
                session: session.clone(),
                from: None,
                ids: vec![self.new_session_id()],
                metadata: None,
                ttl: None,
                max_sessions: 99,
                now: self.now,
                receipt: Some(receipt("fork", receipt_at)),
            })
            .collect();
        let ends = join_all((0..).zip(&forks).map(|(n, fork)| self.server(n).fork(fork.clone()))).await;
        assert_eq!(ends.iter().filter(|end| end.is_ok()).count(), 1, "{ends:?}");
        assert_eq!(ends.iter().filter(|end| **end == Err(StoreError::Answered)).count(), usize::from(RACERS) - 1);
        let sessions = self.index.list(owner(0), None, false, 99).await.expect("the index is read");
        assert_eq!(sessions.len(), 3);
    }

    /// Runs concurrent turns from one version, and moves of the head away from it.
    async fn race_for_the_head(&mut self, session: &SessionId) {
        let mut earlier = self.head(session).await;
        let first = self.turn(session, &earlier);
        self.index.commit(first).await.expect("nobody else moves the head");
        for round in 0..10 {
            let expected = self.head(session).await;
            let mut racers: Vec<(VersionId, BoxFuture<'_, Result<Head, StoreError>>)> = Vec::new();
            let turns: Vec<_> = (0..RACERS / 2).map(|_| self.turn(session, &expected)).collect();
            let rewind = Rewind {
                owner: owner(0),
                session: session.clone(),
                expected: expected.clone(),
                to: earlier.clone(),
                bounds: BOUNDS,
                now: self.now,
            };
            for (n, turn) in turns.into_iter().enumerate() {
                racers.push((turn.version.id.clone(), self.server(n).commit(turn)));
                racers.push((earlier.clone(), self.server(n + 1).rewind(rewind.clone())));
            }
            if round % 2 == 1 {
                racers.reverse();
            }
            let (heads, racers): (Vec<_>, Vec<_>) = racers.into_iter().unzip();
            let ends = join_all(racers).await;
            let won: Vec<_> = heads.iter().zip(&ends).filter(|(_, end)| end.is_ok()).collect();
            let [(head, _)] = won.as_slice() else { panic!("{} requests moved the head: {ends:?}", won.len()) };
            assert_eq!(self.head(session).await, **head);
            let stale = Err(StoreError::Stale { head: (*head).clone() });
            assert_eq!(ends.iter().filter(|end| **end == stale).count(), ends.len() - 1, "{ends:?}");
            earlier = expected;
        }
    }
}
