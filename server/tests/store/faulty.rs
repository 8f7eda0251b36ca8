//! Random operations on a disk that fails at random, either because it is full or with an I/O error, compared with a
//! simple model. A failed operation has happened completely or not at all. An acknowledged one lasts, whatever fails
//! later.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use tidegate_server::session::{
    Fork, Patch, Receipt, ReceiptKey, ResponseId, Session, SessionId, Store, StoreError, StoreOptions, TagName,
    VersionId, VersionRef,
};

use crate::faulty_model::{Action, KEEP, Line, Model, Step, Versions, step};
use crate::kit::{ANN, NOW, Plain, SOON, copies, ended, in_folder, list, new, saying, snapshot, text_of, tokens, told};
use crate::sim::SimDisk;
use crate::sim_objects::SimObjects;

/// The sessions that an action created, each with its head.
type Made = [(SessionId, VersionId)];

struct World {
    disk: SimDisk,
    store: Store,
    model: Model,
    /// Other states that the store may have after a restart, because actions failed and none has succeeded since.
    doubt: Vec<Model>,
    /// Failed actions that have created no session so far, but that a restart may complete; each with the number of its
    /// sessions.
    open: Vec<(Action, usize)>,
    /// Whether the disk was full, so that an eviction may have begun.
    evicts: bool,
    parents: BTreeMap<VersionId, VersionId>,
    keys: Vec<String>,
    named: Vec<ResponseId>,
}

async fn open(disk: &SimDisk) -> Store {
    let folder = PathBuf::from("/sessions");
    let objects = Arc::new(SimObjects { disk: disk.clone(), folder: folder.clone() });
    let options = StoreOptions { keep_versions: KEEP, ram_bytes: 0, ..in_folder(&folder) };
    Store::open_on(Arc::new(disk.clone()), objects, options, Arc::new(Plain)).await.expect("the store opens")
}

fn number(snapshot: &tidegate_server::session::Snapshot) -> u64 {
    snapshot.read - 1
}

impl World {
    /// Returns what the store holds now.
    async fn seen(&self) -> Model {
        let (store, mut seen) = (&self.store, Model::default());
        for session in list(store, ANN, None, usize::MAX, false).await.expect("a list").0 {
            let mut versions = Versions::new();
            for version in store.versions(ANN, &session.id).await.expect("its versions") {
                if version.kept {
                    let loaded = store.load(ANN, &session.id, Some(&version.id)).await.expect("its snapshot").1;
                    assert_eq!(loaded, snapshot(number(&loaded)));
                }
                versions.push((version.id, version.tokens - 1, version.kept));
            }
            let number = |id: &VersionId| versions.iter().find(|found| found.0 == *id).expect("it is listed").1;
            for (id, ..) in &versions {
                assert_eq!(tokens(store, ANN, &session.id, Some(id)).await, text_of(&self.parents, &number, id));
            }
            let (head, metadata, tagged) = (session.head.id, session.metadata, session.tags.into_values().next());
            seen.sessions.insert(session.id, Line { versions, head, metadata, tagged });
        }
        for key in &self.keys {
            if let Some(answer) = store.receipt(ANN, key).await.expect("read") {
                seen.receipts.insert(key.clone(), answer);
            }
        }
        for response in &self.named {
            if store.response(ANN, response).await.is_ok() {
                let found = store.response_snapshot(ANN, response).await.expect("its snapshot").0;
                seen.responses.insert(response.clone(), number(&found));
            }
        }
        seen
    }

    /// Performs an action; returns the sessions that it created.
    async fn act(&self, action: &Action) -> Result<Vec<(SessionId, VersionId)>, StoreError> {
        let store = &self.store;
        let ids = |made: &[Session]| made.iter().map(|made| (made.id.clone(), made.head.id.clone())).collect();
        match action.clone() {
            Action::Create { number, key } => {
                let receipt: Receipt<Session> =
                    (ReceiptKey(key), Box::new(|session| session.id.to_string().into_bytes()));
                let made = store.create_once(ANN, new(told(number)), Some(receipt)).await?;
                return Ok(ids(&[made]));
            }
            Action::Turn { session, version, number, key, .. } => {
                let note = saying(store, ANN, &session, number).await?;
                let turn = store.begin(ANN, &session, None, SOON).await?;
                let receipt = Some((ReceiptKey(key), number.to_string().into_bytes()));
                turn.commit(snapshot(number), note, receipt, version).await?;
            }
            Action::Fork { session, n } => {
                let made = store.fork(ANN, &session, Fork { metadata: None, ..copies(n) }, None).await?;
                return Ok(ids(&made));
            }
            Action::Rewind { session, to } => drop(store.rewind(ANN, &session, &to, None, NOW).await?),
            Action::Tag { session, to } => {
                let tag = TagName::parse("tag").expect("a name");
                drop(store.tag(ANN, &session, tag, Some(VersionRef::Id(to))).await?);
            }
            Action::Update { session, metadata } => {
                store.update(ANN, &session, Patch { metadata: Some(metadata), ..Patch::default() }).await?;
            }
            Action::Expire { session } => {
                store.update(ANN, &session, Patch { ttl: Some(Some(Duration::ZERO)), ..Patch::default() }).await?;
            }
            Action::Delete { session } => store.delete(ANN, &session).await?,
            Action::Receipt { key } => store.put_receipt(ANN, &key, vec![1]).await?,
            Action::Respond { response, number } => {
                store.put_response(ANN, &response, ended(vec![1], snapshot(number)), None).await?;
            }
            Action::Unrespond { response } => store.delete_response(ANN, &response).await?,
        }
        Ok(Vec::new())
    }

    async fn step(&mut self, step: &Step, number: u64, faults: (u64, u32)) {
        if matches!(step, Step::Kill) {
            self.disk = self.disk.killed();
            self.store = open(&self.disk).await;
            return self.settle().await;
        }
        let Some(action) = self.model.plan(step, number) else { return };
        match &action {
            Action::Create { key, .. } | Action::Receipt { key } => self.keys.push(key.clone()),
            Action::Turn { version, parent, key, .. } => {
                self.keys.push(key.clone());
                self.parents.insert(version.clone(), parent.clone());
            }
            Action::Respond { response, .. } => self.named.push(response.clone()),
            _ => {}
        }
        let full = self.disk.full();
        self.disk.fail(faults.0.wrapping_add(number), Some(faults.1));
        let done = self.act(&action).await;
        self.disk.fail(0, None);
        let full = self.disk.full() > full;
        self.evicts |= full;
        match done {
            Ok(made) => {
                let seen = self.seen().await;
                let (_, after) = self.outcomes(&action, &made, &seen, full);
                self.model = after;
                self.doubt.clear();
                self.open.clear();
                assert_eq!(seen, self.model, "after {action:?}");
            }
            Err(error) => {
                let seen = self.seen().await;
                let made = self.model.new_in(&seen);
                let expected = match &action {
                    Action::Create { .. } => 1,
                    Action::Fork { n, .. } => *n,
                    _ => 0,
                };
                let (before, after) = self.outcomes(&action, &made, &seen, full);
                let happened = made.len() == expected && seen == after;
                assert!(happened || seen == before, "{action:?}: {error}\n{seen:#?}\n{before:#?}");
                if happened {
                    self.doubt.push(std::mem::replace(&mut self.model, after));
                    return;
                }
                self.model = before;
                if expected == 0 {
                    self.doubt.push(after);
                } else {
                    self.open.push((action, expected));
                }
            }
        }
    }

    /// Returns the model without and with an action. On a full disk, both lack what `seen` shows as evicted. The
    /// eviction precedes the action's own change, so evicted snapshots no longer count when that change releases old
    /// ones.
    fn outcomes(&self, action: &Action, made: &Made, seen: &Model, full: bool) -> (Model, Model) {
        let evicted = |model: Model| if full { model.evicted(seen) } else { model };
        let before = evicted(self.model.clone());
        let after = evicted(before.after(action, made, &self.parents));
        (before, after)
    }

    /// Checks the store after a restart: everything acknowledged is there, and a failed action has happened completely
    /// or not at all.
    async fn settle(&mut self) {
        let (seen, evicts) = (self.seen().await, std::mem::take(&mut self.evicts));
        let possible = |model: Model| if evicts { model.evicted(&seen) == seen } else { model == seen };
        let made = self.model.new_in(&seen);
        let open = self.open.drain(..).filter(|(_, expected)| made.len() == *expected);
        let mut completed = open.map(|(action, _)| self.model.after(&action, &made, &self.parents));
        if completed.any(possible) || self.doubt.drain(..).any(possible) || possible(self.model.clone()) {
            self.model = seen;
        } else {
            panic!("after a restart:\n{seen:#?}\n{:#?}", self.model);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn what_a_failing_disk_refuses_has_happened_completely_or_not_at_all(
        steps in proptest::collection::vec(step(), 1..40),
        seed in any::<u64>(),
        one_in in 4..60u32,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let disk = SimDisk::default();
            let store = open(&disk).await;
            let (model, doubt, parents) = Default::default();
            let mut world = World { disk, store, model, doubt, open: Vec::new(), evicts: false, parents, keys: Vec::new(), named: Vec::new() };
            for (number, step) in steps.iter().enumerate() {
                world.step(step, number as u64, (seed, one_in)).await;
            }
            world.step(&Step::Kill, 0, (0, 1)).await;
            // The store still works, and closes properly.
            world.step(&Step::Create, 1000, (0, u32::MAX)).await;
            world.store.close().await.expect("closed");
            world.store = open(&world.disk).await;
            world.settle().await;
        });
    }
}
