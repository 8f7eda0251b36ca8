//! Power cuts at random operations of a random workload. What was synced is on the disk, and of the rest any part may
//! be, in sectors of 512 bytes. Everything acknowledged must be there exactly, and nothing may be there by halves.
//!
//! `TIDEGATE_CUTS=5000 TIDEGATE_SEED=7 cargo test -p tidegate-server --test store power` tries more cuts, and other
//! ones.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};
use tidegate_server::session::{
    Metadata, NewSession, Owner, Patch, Receipt, ReceiptKey, ResponseId, Session, Start, Store, StoreOptions, TagName,
    VersionId, VersionRef,
};

use crate::kit::{ANN, BOB, Plain, SOON, copies, ended, in_folder, list, new, saying, snapshot, told};
use crate::sim::SimDisk;
use crate::sim_objects::SimObjects;

const STEPS: usize = 30;

/// Everything that an owner can read, by name.
type View = BTreeMap<String, String>;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |value| value.parse().expect(name))
}

fn options() -> StoreOptions {
    // Without a cache in memory, every snapshot is read from the disk.
    StoreOptions { keep_versions: 3, ram_bytes: 0, ..in_folder(&PathBuf::from("/sessions")) }
}

async fn open(disk: &SimDisk) -> Store {
    let objects = Arc::new(SimObjects { disk: disk.clone(), folder: PathBuf::from("/sessions") });
    Store::open_on(Arc::new(disk.clone()), objects, options(), Arc::new(Plain)).await.expect("the store opens")
}

/// An owner, and the ids of the responses that it may store.
struct Lane {
    owner: Owner,
    responses: Vec<ResponseId>,
}

impl Lane {
    async fn view(&self, store: &Store) -> View {
        let mut view = View::new();
        for session in list(store, self.owner, None, usize::MAX, false).await.expect("a list").0 {
            let mut seen = format!("{} {:?} {:?}", session.head.id, session.metadata, session.forked_from);
            writeln!(seen, " {:?}", session.tags).expect("a line");
            for version in store.versions(self.owner, &session.id).await.expect("its versions") {
                let kept = version.kept;
                let text = store.text(self.owner, &session.id, Some(&version.id), (None, None)).await;
                writeln!(seen, "{:?}", text.map(|(_, part)| part.tokens)).expect("a line");
                let of = (version.parent, version.tokens, version.label, version.session);
                writeln!(seen, "{} {of:?} {kept}", version.id).expect("a line");
                if kept {
                    let loaded = store.load(self.owner, &session.id, Some(&version.id)).await.expect("its snapshot").1;
                    writeln!(seen, "{:?}", loaded.state.first()).expect("a line");
                }
            }
            view.insert(session.id.to_string(), seen);
        }
        for step in 0..=STEPS {
            if let Some(answer) = store.receipt(self.owner, &format!("key {step}")).await.expect("read") {
                view.insert(format!("key {step}"), format!("{answer:?}"));
            }
            if let Ok((body, version)) = store.response(self.owner, &self.responses[step]).await {
                let found = store.response_snapshot(self.owner, &self.responses[step]).await.expect("its snapshot").0;
                view.insert(format!("response {step}"), format!("{body:?} {version} {:?}", found.state.first()));
            }
        }
        view
    }

    async fn step(&self, store: &Store, step: usize, random: &mut StdRng) {
        let sessions = list(store, self.owner, None, usize::MAX, false).await.expect("a list").0;
        let number = random.random_range(0..1000);
        let answer = number.to_string().into_bytes();
        let key = ReceiptKey(format!("key {step}"));
        let Some(session) = sessions.choose(random) else {
            let of_session: Receipt<Session> = (key, Box::new(|session| session.id.to_string().into_bytes()));
            store.create_once(self.owner, new(told(number)), Some(of_session)).await.expect("it");
            return;
        };
        let id = &session.id;
        match random.random_range(0..15) {
            0 => {
                let metadata = Metadata::from([("note".to_owned(), "x".repeat(number as usize))]);
                let made = NewSession { metadata, ..new(Start::Empty { seed: number }) };
                drop(store.create(self.owner, made).await.expect("a session"));
            }
            1 => drop(store.fork(self.owner, id, copies(2), None).await.expect("forks")),
            2 => store.delete(self.owner, id).await.expect("deleted"),
            3 => {
                let versions = store.versions(self.owner, id).await.expect("versions");
                let kept: Vec<_> = versions.into_iter().filter(|version| version.kept).collect();
                let to = &kept.choose(random).expect("the head is kept").id;
                drop(store.rewind(self.owner, id, to, None, SOON).await.expect("rewound"));
            }
            4 => {
                let metadata = Metadata::from([("number".to_owned(), number.to_string())]);
                let patch = Patch { metadata: Some(metadata), ..Patch::default() };
                drop(store.update(self.owner, id, patch).await.expect("updated"));
            }
            5 => {
                let response = &self.responses[step];
                let receipt = Some((key, answer.clone()));
                store
                    .put_response(self.owner, response, ended(answer, snapshot(number)), receipt)
                    .await
                    .expect("stored");
            }
            6 => store.put_receipt(self.owner, &key.0, answer).await.expect("stored"),
            7 => {
                // Adopts the version of another session.
                let other = sessions.choose(random).expect("one of them is `session`");
                drop(store.rewind(self.owner, id, &other.head.id, None, SOON).await.expect("adopted"));
            }
            8 => {
                let tag = TagName::parse(if number % 2 == 0 { "even" } else { "odd" }).expect("a name");
                drop(store.tag(self.owner, id, tag, None).await.expect("tagged"));
            }
            9 => {
                let head = VersionRef::Id(session.head.id.clone());
                drop(store.label(self.owner, id, head, Some(number.to_string())).await.expect("labelled"));
            }
            _ => {
                let turn = store.begin(self.owner, id, None, SOON).await.expect("a turn");
                let receipt = Some((key, answer));
                let note = saying(store, self.owner, id, number).await.expect("a note");
                drop(turn.commit(snapshot(number), note, receipt, VersionId::new()).await.expect("committed"));
            }
        }
    }
}

/// What a lane saw after each step, and the number of disk operations before and after the step.
#[derive(Default)]
struct Seen {
    views: Vec<View>,
    begun: Vec<usize>,
    done: Vec<usize>,
}

impl Seen {
    /// Checks what the lane sees after a power cut.
    fn check(&self, view: &View, cut: usize, what: &str) {
        let acknowledged = self.done.iter().take_while(|done| **done <= cut).count();
        let is_open = self.begun.get(acknowledged).is_some_and(|begun| *begun <= cut);
        let allowed = &self.views[acknowledged..=acknowledged + usize::from(is_open)];
        assert!(
            allowed.contains(view),
            "{what}: after {acknowledged} steps (another begun: {is_open})\nthere: {view:#?}\nallowed: {allowed:#?}"
        );
    }
}

async fn workload(disk: &SimDisk, lanes: &Arc<Vec<Lane>>, seed: u64) -> Vec<Seen> {
    let store = open(disk).await;
    let walks = (0..lanes.len()).map(|number| {
        let (store, lanes, disk) = (store.clone(), Arc::clone(lanes), disk.clone());
        tokio::spawn(async move {
            let (lane, mut random) = (&lanes[number], StdRng::seed_from_u64(seed + number as u64));
            let mut seen = Seen { views: vec![View::new()], ..Seen::default() };
            for step in 0..STEPS {
                seen.begun.push(disk.operations());
                lane.step(&store, step, &mut random).await;
                seen.done.push(disk.operations());
                seen.views.push(lane.view(&store).await);
            }
            seen
        })
    });
    let seen = futures_util::future::join_all(walks).await;
    store.close().await.expect("closed");
    seen.into_iter().map(|seen| seen.expect("the lane ends")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_power_cut_loses_nothing_acknowledged_and_leaves_nothing_by_halves() {
    let (cuts, seed) = (setting("TIDEGATE_CUTS", 80), setting("TIDEGATE_SEED", 1));
    let mut random = StdRng::seed_from_u64(seed);
    let mut tried = 0;
    while tried < cuts {
        let responses = || (0..=STEPS).map(|_| ResponseId::new()).collect();
        let owners = [ANN, BOB, Owner([3; 16])];
        let lanes =
            Arc::new(owners.map(|owner| Lane { owner, responses: responses() }).into_iter().collect::<Vec<_>>());
        let disk = SimDisk::default();
        let seen = workload(&disk, &lanes, random.random_range(0..u64::MAX / 2)).await;
        for _ in 0..cuts.min(80) {
            tried += 1;
            let cut = random.random_range(0..=disk.operations());
            let image = disk.cut(cut, &mut random);
            let what = format!("TIDEGATE_SEED={seed}, cut {tried} after {cut} operations");
            let store = open(&image).await;
            for (lane, seen) in lanes.iter().zip(&seen) {
                seen.check(&lane.view(&store).await, cut, &what);
            }
            if tried % 3 != 0 {
                continue;
            }
            // The power fails again, during recovery or soon after.
            let again = image.cut(random.random_range(0..=image.operations()), &mut random);
            let store = open(&again).await;
            for (lane, seen) in lanes.iter().zip(&seen) {
                seen.check(&lane.view(&store).await, cut, &format!("{what}, and again"));
            }
            // The store still works.
            lanes[0].step(&store, STEPS, &mut random).await;
            let view = lanes[0].view(&store).await;
            store.close().await.expect("closed");
            assert_eq!(lanes[0].view(&open(&again).await).await, view, "{what}, a step later");
        }
    }
    println!("{tried} power cuts");
}
