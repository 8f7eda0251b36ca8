//! Tests that every implementation of [`Index`] must pass: random operations, each compared with the result of the
//! model in `model.rs`, races for a session's head and for an owner's last session, and turns on two servers in every
//! order.

mod agree;
mod asked;
mod interleavings;
mod model;
mod protocol;
mod races;
mod space;
mod steps;

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

pub(crate) use self::interleavings::interleaves;
use self::model::Model;
pub(crate) use self::races::excludes;
use self::steps::{Step, step};
use super::*;
use crate::session::patch::Patch;
use crate::session::tag::{TagName, VersionRef};
use crate::session::text::AddedText;

/// Milliseconds between two operations; each operation has its own time.
const TICK: u64 = 1000;

fn owner(number: u8) -> Owner {
    Owner([number + 1; 16])
}

fn bounds((keep, lineage): (u8, u8)) -> Bounds {
    Bounds { keep: keep.into(), lineage: lineage.into() }
}

fn tag(number: u8) -> TagName {
    TagName::parse(&format!("tag-{number}")).expect("a name")
}

/// Returns an answer that shows what its function is given, and that fails for some sessions.
fn answer() -> Answer {
    Answer(Arc::new(|Forks { sessions, head }| {
        if sessions.iter().any(|(_, row)| row.metadata.get("a").is_some_and(|bytes| bytes == "4")) {
            return Err(StoreError::Unavailable { reason: "there is no answer".to_owned() });
        }
        let ids: Vec<&str> = sessions.iter().map(|(id, _)| id.as_str()).collect();
        Ok(format!("{} {}", ids.join(" "), head.tokens).into_bytes())
    }))
}

/// The index, the model, and everything that has ever existed.
struct World {
    index: Arc<dyn Index>,
    /// The same index, or that of another server.
    other: Arc<dyn Index>,
    model: Model,
    sessions: Vec<(Owner, SessionId)>,
    versions: Vec<VersionId>,
    /// The owner of each version.
    owners: HashMap<String, Owner>,
    responses: Vec<ResponseId>,
    /// The space that the requests of the current step have reserved for new versions.
    reserved: Vec<(String, Arc<Reservation>)>,
    /// The number of ids made so far.
    ids: u128,
    now: u64,
}

/// Bytes that each new version reserves.
const RESERVED: u64 = 100;

/// The default seed if `TIDEGATE_SEED` is not set, and the number of cases with which it reaches each refusal.
const SEED: u64 = 1;
const MANY: u32 = 64;

/// Runs random operations on indexes; another `TIDEGATE_SEED` gives other operations. `start` is called for each case;
/// the function that it returns opens an index in a new place, and opens it again after the test has closed it. `lasts`
/// says whether what was stored then still exists.
pub(crate) fn conforms<O: AsyncFn() -> Arc<dyn Index>>(cases: u32, lasts: bool, start: impl Fn() -> O) {
    let seed = std::env::var("TIDEGATE_SEED").map_or(SEED, |seed| seed.parse().expect("TIDEGATE_SEED is a number"));
    let bytes: Vec<u8> = (0..4).flat_map(|word| u64::to_le_bytes(seed + word)).collect();
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let reached = Mutex::new(BTreeSet::new());
    let run = |steps: Vec<Step>| {
        crate::sync::block_on(async {
            let open = start();
            let index = open().await;
            let mut world = World::new(index);
            for step in steps {
                world.now += TICK;
                if !matches!(step, Step::Reopen) {
                    let unlists = matches!(step, Step::Commit { .. } | Step::Rewind { .. } | Step::Evict { .. });
                    let tags = world.model.tags();
                    world.step(step).await;
                    if unlists && world.model.tags() < tags {
                        world.model.reached.insert("unlisted tag");
                    }
                } else if lasts {
                    world.index.close().await.expect("the index closes");
                    world.index = open().await;
                }
                world.agree().await;
            }
            world.index.close().await.expect("the index closes");
            reached.lock().unwrap_or_else(PoisonError::into_inner).append(&mut world.model.reached);
        });
        Ok(())
    };
    if let Err(error) = runner.run(&proptest::collection::vec(step(), 1..80), run) {
        panic!("TIDEGATE_SEED={seed}: {error}");
    }
    let reached = reached.into_inner().unwrap_or_else(PoisonError::into_inner);
    let all = ["answered", "forks", "quota", "stale", "tags", "unlisted tag"];
    let is_enough = all.iter().all(|name| reached.contains(name));
    println!("TIDEGATE_SEED={seed} has reached {reached:?}");
    assert!(is_enough || seed != SEED || cases < MANY);
}

impl World {
    fn new(index: Arc<dyn Index>) -> Self {
        let (model, sessions, versions, owners, responses, reserved, ids) = Default::default();
        let other = Arc::clone(&index);
        Self { index, other, model, sessions, versions, owners, responses, reserved, ids, now: 1_000_000_000 }
    }

    /// Returns the digits of a new id. They are the same in each run, and not in order of creation.
    fn digits(&mut self) -> String {
        self.ids += 1;
        format!("{:032x}", self.ids.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835))
    }

    fn new_session_id(&mut self) -> SessionId {
        SessionId::parse(&format!("ses_{}", self.digits())).expect("an id")
    }

    fn new_version_id(&mut self) -> VersionId {
        VersionId::parse(&format!("ver_{}", self.digits())).expect("an id")
    }

    fn session(&self, choice: usize) -> Option<(Owner, SessionId)> {
        // The first sessions are chosen more often, so that some get long lists.
        let among = if choice.is_multiple_of(3) { self.sessions.len() } else { self.sessions.len().min(3) };
        let (owner, id) = self.sessions.get((choice / 3).checked_rem(among)?)?.clone();
        // Sometimes another owner asks.
        Some((if choice % 11 == 10 { Owner([9; 16]) } else { owner }, id))
    }

    fn version(&self, choice: usize) -> VersionId {
        // Newer versions are chosen more often, because old ones are gone.
        let recent = self.versions.len().min(if choice.is_multiple_of(4) { usize::MAX } else { 8 });
        match choice.checked_rem(recent) {
            Some(at) => self.versions[self.versions.len() - 1 - at].clone(),
            None => VersionId::new(),
        }
    }

    /// Returns any version, or one that the owner could use for a session: from the session's list, or kept elsewhere.
    fn version_for(&self, owner: Owner, session: &SessionId, choice: usize) -> VersionId {
        let candidates: Vec<&String> = match (choice % 4, self.model.session(owner, session)) {
            (0, _) | (_, Err(_)) => Vec::new(),
            (1, Ok(_)) => {
                let versions = self.model.versions.iter();
                versions.filter(|(id, row)| row.owner == owner && self.model.is_kept(id)).map(|(id, _)| id).collect()
            }
            (_, Ok(kept)) => kept.list.iter().map(|(id, _)| id).collect(),
        };
        match (choice / 4).checked_rem(candidates.len()) {
            Some(at) => VersionId::parse(candidates[at]).expect("an id"),
            None => self.version(choice),
        }
    }

    /// Returns the version from which a turn of a session starts, or another one.
    fn expected(&self, owner: Owner, session: &SessionId, other: Option<usize>) -> VersionId {
        let head = self.model.session(owner, session).ok().and_then(|kept| VersionId::parse(&kept.row.head));
        other.map(|other| self.version(other)).or(head).unwrap_or_else(VersionId::new)
    }

    /// Makes a new version; `text` chooses how much of its parent's text it keeps.
    fn new_version(&mut self, owner: Owner, parent: Option<&VersionId>, bytes: u8, text: u8) -> NewVersion {
        let (id, number) = (self.new_version_id(), self.versions.len());
        self.versions.push(id.clone());
        self.owners.insert(id.to_string(), owner);
        let row = VersionRow {
            owner,
            parent: parent.map(ToString::to_string),
            tokens: number as u64,
            time: self.now,
            label: None,
            kind: "turn".to_owned(),
            prompt_tokens: 1,
            completion_tokens: 2,
            bytes: bytes.into(),
            seed: (bytes == 0).then_some(7),
            kept_by: 0,
            known_by: 0,
            origin: Vec::new(),
            session: None,
        };
        let kept = parent.and_then(|parent| Some(TextRow::parse(self.model.texts.get(parent.as_str())?).ok()?.total()));
        let kept = match text {
            0 => None,
            1 => Some(0),
            2 => Some(kept.unwrap_or(0).saturating_sub(1)),
            _ => Some(kept.unwrap_or(0)),
        };
        let added = |kept| AddedText { kept, tokens: vec![number as u32; 3], messages: Vec::new() };
        let text = kept.map(|kept| EncodedText::new(&added(kept)));
        let (capacity, limits) = (self.index.capacity(), Limits { disk: u64::MAX, owner: u64::MAX });
        let reserved = Arc::new(capacity.reserve(owner, RESERVED, limits).expect("there is no limit"));
        self.reserved.push((id.to_string(), Arc::clone(&reserved)));
        NewVersion { id, row, text, reserved: vec![reserved] }
    }

    /// Records which refusals were reached.
    fn note<T>(&mut self, done: Result<T, StoreError>) -> Result<T, StoreError> {
        let name = match &done {
            Err(StoreError::Answered) => "answered",
            Err(StoreError::TooManyForks { .. }) => "forks",
            Err(StoreError::Quota { .. }) => "quota",
            Err(StoreError::Stale { .. }) => "stale",
            Err(StoreError::TooManyTags { .. }) => "tags",
            _ => return done,
        };
        self.model.reached.insert(name);
        done
    }

    #[expect(clippy::too_many_lines, reason = "an arm for each operation")]
    async fn step(&mut self, step: Step) {
        let (index, now) = (Arc::clone(&self.index), self.now);
        match step {
            Step::Create { owner: number, from, replace, bytes, ttl, max } => {
                let owner = owner(number);
                let replaced = replace.and_then(|choice| self.session(choice));
                let (replace, id) = match replaced {
                    Some((_, id)) => (true, id),
                    None => (false, self.new_session_id()),
                };
                let version = match from {
                    Some(_) => None,
                    None => Some(self.new_version(owner, None, bytes, bytes % 3)),
                };
                let head =
                    version.as_ref().map_or_else(|| self.version(from.unwrap_or(0)), |version| version.id.clone());
                let mut row = SessionRow::new(owner, head.as_str(), ttl.map(Into::into), now);
                row.metadata.insert("a".to_owned(), bytes.to_string());
                let key = (bytes % 2 == 0).then(|| "create".to_owned());
                let receipt = key.map(|key| NewReceipt { key, now, ends: now + 3 * TICK, answer: answer() });
                let max_sessions = max.into();
                let may = index.may_create(owner, Some(&id).filter(|_| replace), max_sessions).await;
                assert_eq!(may, self.model.check_create(owner, Some(&id).filter(|_| replace), max_sessions));
                let create = Create { id: id.clone(), row, version, replace, max_sessions, receipt };
                let done = self.model.create(&create);
                agree::heads(index.create(create.clone()).await, self.note(done));
                self.sessions.push((owner, id));
            }
            Step::Commit { session, expected, bytes, text, forks, max, bounds: of } => {
                let Some((owner, session)) = self.session(session) else { return };
                let expected = self.expected(owner, &session, expected);
                let version = self.new_version(owner, Some(&expected), bytes, text);
                let forks: Vec<_> = (0..forks)
                    .map(|n| (self.new_session_id(), self.new_version(owner, Some(&expected), bytes + n, text)))
                    .collect();
                self.sessions.extend(forks.iter().map(|(id, _)| (owner, id.clone())));
                let key = (bytes % 2 == 0).then(|| "commit".to_owned());
                let receipt = key.map(|key| NewReceipt { key, now, ends: now + 3 * TICK, answer: vec![bytes; 9] });
                let (max_sessions, bounds) = (max.into(), bounds(of));
                let commit = Commit { owner, session, expected, version, forks, max_sessions, bounds, now, receipt };
                let done = self.model.commit(&commit);
                agree::heads(index.commit(commit.clone()).await, self.note(done));
            }
            Step::Rewind { session, expected, to, bounds: of } => {
                let Some((owner, session)) = self.session(session) else { return };
                let (expected, to) = (self.expected(owner, &session, expected), self.version_for(owner, &session, to));
                let rewind = Rewind { owner, session, expected, to, bounds: bounds(of), now };
                let done = self.model.rewind(&rewind);
                agree::heads(index.rewind(rewind.clone()).await, self.note(done));
            }
            Step::Fork { session, from, n, ttl, max } => {
                let Some((owner, session)) = self.session(session) else { return };
                let from = from.map(|from| self.version_for(owner, &session, from));
                let max_sessions = max.into();
                if let Some(from) = &from {
                    let may = index.may_fork(owner, (&session, from), n.into(), max_sessions).await;
                    let model = self.model.check_fork(owner, (&session, from.as_str()), n.into(), max_sessions);
                    assert_eq!(may, model.map(drop));
                }
                let ids: Vec<_> = (0..n).map(|_| self.new_session_id()).collect();
                self.sessions.extend(ids.iter().map(|id| (owner, id.clone())));
                let metadata = (n == 2).then(|| BTreeMap::from([("fork".to_owned(), n.to_string())]));
                let key = (n % 2 == 0).then(|| "fork".to_owned());
                let receipt = key.map(|key| NewReceipt { key, now, ends: now + 3 * TICK, answer: answer() });
                let ttl = ttl.map(Into::into);
                let fork = Fork { owner, session, from, ids, metadata, ttl, max_sessions, now, receipt };
                let done = self.model.fork(&fork);
                agree::forks(index.fork(fork.clone()).await, self.note(done));
            }
            Step::Patch { session, ttl, label } => {
                let metadata = label.map(|label| BTreeMap::from([("patched".to_owned(), label.to_string())]));
                let label = label.map(|label| (label > 0).then(|| label.to_string()));
                let ttl = ttl.map(|ttl| (ttl > 0).then(|| Duration::from_secs(ttl.into())));
                self.edit(session, Edit::Patch(Patch { metadata, ttl, label })).await;
            }
            Step::Tag { session, name, version, of } => {
                let Some((owner, id)) = self.session(session) else { return };
                let version = version.map(|version| VersionRef::Id(self.version_for(owner, &id, version)));
                let meant = version.or(of.map(|of| VersionRef::Tag(tag(of))));
                self.edit(session, Edit::Tag(tag(name), meant)).await;
            }
            Step::Untag { session, name } => self.edit(session, Edit::Untag(tag(name))).await,
            Step::Label { session, version, tag: named, label } => {
                let Some((owner, id)) = self.session(session) else { return };
                let version = VersionRef::Id(self.version_for(owner, &id, version));
                let meant = named.map_or(version, |of| VersionRef::Tag(tag(of)));
                self.edit(session, Edit::Label(meant, label.map(|label| label.to_string()))).await;
            }
            Step::Delete(session) => {
                let Some((owner, id)) = self.session(session) else { return };
                assert_eq!(index.delete(owner, &id).await, self.model.delete(owner, &id));
            }
            Step::Use(session) => {
                let Some((_, id)) = self.session(session) else { return };
                let uses = HashMap::from([(id, now), (SessionId::new(), now)]);
                self.model.record_uses(&uses);
                index.record_uses(uses).await.expect("the uses are recorded");
            }
            Step::Respond { owner: number, parent, bytes, text, ttl } => {
                let (owner, digits) = (owner(number), self.digits());
                let id = ResponseId::parse(&format!("resp_{digits}")).expect("an id");
                let parent = parent.map(|parent| self.version(parent));
                // A text continues only a text of the same owner.
                let own = |parent: &VersionId| self.owners.get(parent.as_str()) == Some(&owner);
                let parent = parent.filter(|parent| own(parent) && self.model.is_listed(parent.as_str()));
                let version = self.new_version(owner, parent.as_ref(), bytes, text);
                let ends = now + u64::from(ttl) * TICK;
                let row = ResponseRow { owner, version: version.id.to_string(), ends, body: vec![bytes] };
                let key = (bytes % 2 == 0).then(|| "respond".to_owned());
                let receipt = key.map(|key| NewReceipt { key, now, ends, answer: vec![bytes] });
                self.responses.push(id.clone());
                let new = NewResponse { id, row, version, receipt };
                assert_eq!(index.put_response(new.clone()).await, self.model.put_response(&new));
            }
            Step::Unrespond { owner: number, response } => {
                let Some(at) = response.checked_rem(self.responses.len()) else { return };
                let (owner, id) = (owner(number), &self.responses[at]);
                assert_eq!(index.delete_response(owner, id).await, self.model.delete_response(owner, id));
            }
            Step::Receipt { owner: number, key, ttl } => {
                let (key, ends) = (format!("key {key}"), now + u64::from(ttl) * TICK);
                let receipt = NewReceipt { key, now, ends, answer: vec![ttl; 5] };
                self.model.put_receipt(owner(number), &receipt);
                index.put_receipt(owner(number), receipt).await.expect("the receipt is stored");
            }
            Step::Expire { after, exempt } => {
                let now = now + u64::from(after) * TICK;
                let ids: BTreeSet<_> =
                    exempt.and_then(|choice| self.session(choice)).into_iter().map(|(_, id)| id).collect();
                let names = ids.clone();
                let exempt: Exempt = Arc::new(move |name| names.iter().any(|id| id.as_str() == name));
                let can = index.can_sweep(now, Arc::clone(&exempt)).await.expect("the index is read");
                let dead_texts = self.model.texts.len() > self.model.needed_texts().len();
                let expired = self.model.expire(now, &ids);
                assert_eq!(can, expired > 0 || dead_texts);
                assert_eq!(index.expire(now, exempt).await, Ok(expired));
            }
            Step::Prune => assert_eq!(index.prune_texts().await, Ok(self.model.prune_texts())),
            Step::Evict { owner: number, part, lineage } => {
                let victims = Victims::only(owner(number));
                let bytes: Vec<u64> = (1..1000).collect();
                let most = bytes.partition_point(|missing| self.model.evictable(owner(number), *missing).is_some());
                let missing = (most as u64 * u64::from(part)).div_ceil(100);
                let can = index.can_evict(victims.clone(), missing).await;
                assert_eq!(can, Ok(self.model.evictable(owner(number), missing).is_some()));
                let evicted = index.evict(victims, missing, lineage.into()).await;
                assert_eq!(evicted, Ok(self.model.evict(owner(number), missing, lineage.into())));
            }
            Step::Forget(some) => {
                let garbage = index.garbage(usize::from(some % 5)).await.expect("the index is read");
                for id in &garbage {
                    assert!(self.model.garbage.remove(id.as_str()).is_some(), "{id} is garbage");
                }
                index.forget_garbage(garbage).await.expect("the garbage is forgotten");
            }
            Step::Reopen => {}
        }
    }

    async fn edit(&mut self, session: usize, edit: Edit) {
        let Some((owner, id)) = self.session(session) else { return };
        let done = self.model.edit(owner, &id, &edit, self.now);
        agree::edits(self.index.edit(owner, &id, edit, self.now).await, self.note(done));
    }
}
