//! Compares the choice of what to evict with a simple model of it, and counts the index rows that the search reads.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use redb::{Durability, ReadableDatabase};

use super::*;
use crate::session::embedded::database::OpenIndex;
use crate::session::embedded::file::read_totals;
use crate::session::index::branches::push_head;
use crate::session::index::{Bounds, Limits, Shortfall, VersionRow};

const LINEAGE: usize = 1000;

/// Returns the owner with this number.
fn owner(number: u64) -> Owner {
    Owner(u128::from(number).to_be_bytes())
}

fn empty_index() -> OpenIndex {
    OpenIndex::in_memory().expect("an index in memory")
}

/// Runs a transaction, and removes the garbage that it leaves.
fn change<T>(index: &OpenIndex, work: impl FnOnce(&mut Write<'_>) -> Result<T, IndexError>) -> T {
    let done = index.with(|database| {
        let mut transaction = database.begin_write()?;
        transaction.set_durability(Durability::None)?;
        let mut write = Write::new(&transaction)?;
        let result = work(&mut write)?;
        let garbage = write.tables.garbage(usize::MAX)?;
        write.remove_garbage(&garbage)?;
        let change = std::mem::take(&mut write.change);
        drop(write);
        transaction.commit()?;
        index.capacity.apply(change);
        Ok(result)
    });
    done.expect("the transaction commits")
}

fn version_row(owner: Owner, bytes: u64) -> VersionRow {
    VersionRow {
        owner,
        parent: None,
        tokens: 1,
        time: 0,
        label: None,
        kind: String::new(),
        prompt_tokens: 0,
        completion_tokens: 0,
        bytes,
        seed: (bytes == 0).then_some(1),
        kept_by: 0,
        known_by: 0,
        origin: Vec::new(),
        session: None,
    }
}

/// A session or a stored response.
#[derive(Clone, Debug)]
struct Thing {
    name: String,
    owner: Owner,
    rank: u64,
    /// The versions it keeps, with their positions.
    kept: Vec<(u64, usize)>,
    /// The head; `None` for a response.
    head: Option<usize>,
}

/// The index, and beside it the expected contents as plain lists.
struct World {
    index: OpenIndex,
    things: Vec<Thing>,
    /// Size of each version in bytes, by number.
    versions: Vec<u64>,
    now: u64,
}

fn version_name(number: usize) -> String {
    format!("ver_{number:032x}")
}

impl World {
    fn new() -> Self {
        Self { index: empty_index(), things: Vec::new(), versions: Vec::new(), now: 0 }
    }

    fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    fn row(&self, name: &str) -> SessionRow {
        self.index.read(|tables| tables.session(name)).expect("a row").expect("the session")
    }

    /// Creates a session with versions of these sizes; the last one is its head.
    fn create(&mut self, owner: Owner, sizes: &[u64]) {
        let used = self.tick();
        let name = format!("ses_{:032x}", u128::MAX - u128::from(used));
        let first = self.versions.len();
        self.versions.extend(sizes);
        let versions: Vec<String> = (first..self.versions.len()).map(version_name).collect();
        self.add(owner, &name, used, &versions, |write| {
            sizes.iter().zip(&versions).try_for_each(|(bytes, version)| {
                write.add_version(version, &version_row(owner, *bytes))?;
                write.point(version, 1, 1)
            })
        });
        let kept = (0..).zip(first..self.versions.len()).collect();
        self.things.push(Thing { name, owner, rank: used, kept, head: Some(self.versions.len() - 1) });
    }

    fn add(
        &self,
        owner: Owner,
        name: &str,
        used: u64,
        versions: &[String],
        before: impl FnOnce(&mut Write<'_>) -> Result<(), IndexError>,
    ) {
        let row = SessionRow {
            owner,
            number: 0,
            created: 0,
            updated: 0,
            used,
            ttl: None,
            head: versions.last().expect("a version").clone(),
            metadata: BTreeMap::new(),
            forked_from: None,
            next: 0,
            kept: 0,
            known: 0,
            tags: BTreeMap::new(),
        };
        let versions: Vec<(String, bool)> = versions.iter().map(|version| (version.clone(), true)).collect();
        change(&self.index, |write| {
            before(write)?;
            write.add_session(name, row, &versions).map(drop)
        });
    }

    fn session(&self, choice: usize) -> Option<usize> {
        let sessions: Vec<usize> = (0..self.things.len()).filter(|at| self.things[*at].head.is_some()).collect();
        Some(sessions[choice.checked_rem(sessions.len())?])
    }

    /// Stores a session's row after `work` has changed it, with a new time of last use.
    fn put(&mut self, at: usize, work: impl FnOnce(&mut Write<'_>, &str, &mut SessionRow) -> Result<(), IndexError>) {
        let used = self.tick();
        self.things[at].rank = used;
        let name = &self.things[at].name;
        let old = self.row(name);
        change(&self.index, |write| {
            let mut row = SessionRow { used, ..old.clone() };
            work(write, name, &mut row)?;
            write.put_session(name, Some(&old), Some(&row))
        });
    }

    fn turn(&mut self, at: usize, bytes: u64) {
        let (owner, version) = (self.things[at].owner, self.versions.len());
        self.versions.push(bytes);
        let next = self.row(&self.things[at].name).next;
        self.put(at, |write, name, row| {
            write.add_version(&version_name(version), &version_row(owner, bytes))?;
            push_head(write, name, row, &version_name(version), Bounds { keep: usize::MAX, lineage: LINEAGE })
        });
        let thing = &mut self.things[at];
        thing.kept.push((next, version));
        thing.head = Some(version);
    }

    /// Creates a session with the same versions.
    fn fork(&mut self, at: usize) {
        let mut fork = self.things[at].clone();
        fork.rank = self.tick();
        fork.name = format!("ses_{:032x}", u128::MAX - u128::from(fork.rank));
        // The head is the last version in a fork.
        fork.kept.sort_by_key(|(position, version)| (Some(*version) == fork.head, *position));
        for (position, kept) in (0..).zip(&mut fork.kept) {
            kept.0 = position;
        }
        let versions: Vec<String> = fork.kept.iter().map(|(_, version)| version_name(*version)).collect();
        self.add(fork.owner, &fork.name, fork.rank, &versions, |write| {
            versions.iter().try_for_each(|version| write.point(version, 1, 1))
        });
        self.things.push(fork);
    }

    fn rewind(&mut self, at: usize, choice: usize) {
        let head = self.things[at].kept[choice % self.things[at].kept.len()].1;
        self.put(at, |_, _, row| {
            row.head = version_name(head);
            Ok(())
        });
        self.things[at].head = Some(head);
    }

    fn respond(&mut self, owner: Owner, bytes: u64) {
        let ends = self.tick();
        let (name, version) = (format!("resp_{ends:032x}"), self.versions.len());
        self.versions.push(bytes);
        let row = ResponseRow { owner, version: version_name(version), ends, body: Vec::new() };
        change(&self.index, |write| {
            write.add_version(&row.version, &version_row(owner, bytes))?;
            write.put_response(&name, &row)
        });
        self.things.push(Thing { name, owner, rank: response_rank(ends), kept: vec![(0, version)], head: None });
    }

    fn delete(&mut self, at: usize) {
        let thing = self.things.remove(at);
        let row = self.row(&thing.name);
        change(&self.index, |write| write.remove_session(&thing.name, &row));
    }

    /// Returns the bytes that each owner uses, counting each version once.
    fn usage(&self) -> BTreeMap<Owner, u64> {
        let kept: BTreeSet<(Owner, usize)> = self
            .things
            .iter()
            .flat_map(|thing| thing.kept.iter().map(|(_, version)| (thing.owner, *version)))
            .collect();
        let mut usage = BTreeMap::new();
        for (owner, version) in kept {
            *usage.entry(owner).or_default() += self.versions[version];
        }
        usage.retain(|_, bytes| *bytes > 0);
        usage
    }

    /// Returns the versions that may be evicted, each with its holders, in eviction order. A version counts as used
    /// when the most recently used of its sessions was.
    fn evictable(&self, of: Owner) -> Vec<(usize, Vec<Holder>)> {
        let mut holders: BTreeMap<usize, Vec<(u64, String, u64)>> = BTreeMap::new();
        for thing in self.things.iter().filter(|thing| thing.owner == of) {
            for (position, version) in &thing.kept {
                holders.entry(*version).or_default().push((thing.rank, thing.name.clone(), *position));
            }
        }
        let is_head = |version| self.things.iter().any(|thing| thing.head == Some(version));
        let mut found: Vec<_> =
            holders.into_iter().filter(|(version, _)| self.versions[*version] > 0 && !is_head(*version)).collect();
        found.sort_by_key(|(_, holders)| holders.iter().max().cloned());
        let holder = |(_, name, position)| (name, position);
        found.into_iter().map(|(version, holders)| (version, holders.into_iter().map(holder).collect())).collect()
    }

    /// Returns what the definition evicts to store `bytes` of `writer`; `None` if they cannot be stored.
    fn expected(&self, writer: Owner, bytes: u64, disk: u64) -> Option<BTreeSet<Holder>> {
        let mut usage = self.usage();
        *usage.entry(writer).or_default() += bytes;
        let share = disk / usage.len() as u64;
        let mut evictable: BTreeMap<Owner, Vec<_>> =
            usage.keys().map(|owner| (*owner, self.evictable(*owner))).collect();
        let mut evicted = BTreeSet::new();
        while usage.values().sum::<u64>() > disk {
            let may_lose = |(owner, used): &(&Owner, &mut u64)| {
                !evictable[*owner].is_empty() && (**used > share || **owner == writer)
            };
            let victim = usage.iter_mut().filter(may_lose).max_by_key(|(owner, used)| (**used, **owner));
            let (owner, used) = victim?;
            let (version, holders) = evictable.get_mut(owner).expect("an owner").remove(0);
            *used -= self.versions[version];
            evicted.extend(holders);
        }
        Some(evicted)
    }

    /// Makes space for `bytes` of an owner as the store does, and stores them.
    fn store(&mut self, writer: Owner, bytes: u64, disk: u64) -> Result<(), TestCaseError> {
        let limits = Limits { disk, owner: u64::MAX };
        let expected = self.expected(writer, bytes, disk);
        let plan = match self.index.capacity.fits(writer, bytes, limits) {
            Ok(()) => Plan { holders: Some(Vec::new()), rows: 0 },
            Err(Shortfall::Disk { missing }) => {
                let victims = self.index.capacity.victims(writer, bytes, missing);
                self.index.read(|tables| tables.droppable(&victims, missing)).expect("a plan")
            }
            Err(found @ Shortfall::Owner { .. }) => panic!("{found:?}"),
        };
        let chosen = plan.holders.map(|holders| holders.into_iter().collect::<BTreeSet<_>>());
        prop_assert_eq!(&chosen, &expected);
        let Some(chosen) = chosen else { return Ok(()) };
        let holders: Vec<Holder> = chosen.iter().cloned().collect();
        change(&self.index, |write| write.evict(&holders, LINEAGE));
        for thing in &mut self.things {
            thing.kept.retain(|(position, _)| !chosen.contains(&(thing.name.clone(), *position)));
        }
        self.things.retain(|thing| !thing.kept.is_empty());
        let reserved = self.index.capacity.reserve(writer, bytes, limits);
        prop_assert!(reserved.is_ok(), "there is space now: {:?}", reserved);
        drop(reserved);
        self.create(writer, &[bytes]);
        Ok(())
    }
}

#[derive(Clone, Debug)]
enum Step {
    Create(u64, Vec<u64>),
    Turn(usize, u64),
    Fork(usize),
    Rewind(usize, usize),
    Respond(u64, u64),
    Delete(usize),
    Store(u64, u64),
}

fn step() -> impl Strategy<Value = Step> {
    let (owner, some, bytes) = (0..4u64, 0..1000usize, 1..40u64);
    prop_oneof![
        2 => (owner.clone(), proptest::collection::vec(bytes.clone(), 0..4), any::<bool>()).prop_map(
            |(owner, mut sizes, empty)| {
                // A conversation may start with an empty version.
                if empty || sizes.is_empty() {
                    sizes.insert(0, 0);
                }
                Step::Create(owner, sizes)
            }
        ),
        6 => (some.clone(), bytes.clone()).prop_map(|(session, bytes)| Step::Turn(session, bytes)),
        1 => some.clone().prop_map(Step::Fork),
        1 => (some.clone(), some.clone()).prop_map(|(session, version)| Step::Rewind(session, version)),
        1 => (owner.clone(), bytes.clone()).prop_map(|(owner, bytes)| Step::Respond(owner, bytes)),
        1 => some.prop_map(Step::Delete),
        4 => (owner, bytes).prop_map(|(owner, bytes)| Step::Store(owner, bytes)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn what_is_evicted_is_what_the_definition_says(
        steps in proptest::collection::vec(step(), 1..60),
        disk in 50..400u64,
    ) {
        let mut world = World::new();
        for step in steps {
            match step {
                Step::Create(number, sizes) => world.create(owner(number), &sizes),
                Step::Respond(number, bytes) => world.respond(owner(number), bytes),
                Step::Store(number, bytes) => world.store(owner(number), bytes, disk)?,
                Step::Turn(choice, bytes) => if let Some(at) = world.session(choice) { world.turn(at, bytes) },
                Step::Fork(choice) => if let Some(at) = world.session(choice) { world.fork(at) },
                Step::Rewind(choice, version) => if let Some(at) = world.session(choice) { world.rewind(at, version) },
                Step::Delete(choice) => if let Some(at) = world.session(choice) { world.delete(at) },
            }
        }
        // The totals in memory rank the owners in the same order as the rows do.
        let kept = world.index.capacity.ranked();
        let totals = world.index.with(|database| read_totals(&Tables::reading(&database.begin_read()?)?));
        world.index.capacity.replace(totals.expect("totals"));
        prop_assert_eq!(kept, world.index.capacity.ranked());
    }
}

/// Returns the number of rows read to free one version of an owner over its share, beside `others` sessions of each
/// kind.
fn rows_read(others: u64) -> u64 {
    let mut world = World::new();
    for number in 0..others {
        // Within its share.
        world.create(owner(1000 + number), &[1, 1]);
        // Over its share, but with nothing to evict.
        world.create(owner(10_000 + number), &[0, 500]);
        // Sessions of the owner that is over its share.
        world.create(owner(1), &[0, 1]);
        world.create(owner(1), &[1]);
    }
    world.create(owner(1), &[300, 300]);
    for _ in 0..others {
        world.create(owner(1), &[1, 1]);
    }
    let total: u64 = world.usage().values().sum();
    let limits = Limits { disk: total, owner: u64::MAX };
    let Err(Shortfall::Disk { missing }) = world.index.capacity.fits(owner(0), 10, limits) else {
        panic!("the disk is not full")
    };
    let victims = world.index.capacity.victims(owner(0), 10, missing);
    let plan = world.index.read(|tables| tables.droppable(&victims, missing)).expect("a plan");
    assert_eq!(plan.holders.map(|holders| holders.len()), Some(1));
    plan.rows
}

#[test]
fn finding_what_to_evict_reads_as_many_rows_however_many_sessions_and_owners_there_are() {
    let few = rows_read(3);
    assert!((1..10).contains(&few), "{few}");
    assert_eq!(rows_read(100), few);
}
