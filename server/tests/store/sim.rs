//! A simulated disk in memory. It records every operation, can lose power after any of them, and fails on demand.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, ErrorKind};
use std::path::{Path as FilePath, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{Rng as _, SeedableRng as _};
use tidegate_server::session::{Disk, DiskFile, OpenMode};

/// Number of bytes that a disk writes atomically.
const SECTOR: usize = 512;

/// An operation on the disk. Files are numbers, and names refer to them.
#[derive(Clone, Debug)]
enum Op {
    Create(PathBuf, usize),
    Rename(PathBuf, PathBuf, usize),
    Remove(PathBuf),
    SyncFolder(PathBuf),
    Write(usize, usize, Vec<u8>),
    Length(usize, usize),
    Sync(usize),
}

/// The names, and the contents of the files.
#[derive(Clone, Debug, Default)]
struct Image {
    names: BTreeMap<PathBuf, usize>,
    files: Vec<Vec<u8>>,
}

impl Image {
    fn apply_to_names(&mut self, op: &Op) {
        match op {
            Op::Create(path, file) => drop(self.names.insert(path.clone(), *file)),
            Op::Rename(from, to, file) => {
                self.names.remove(from);
                self.names.insert(to.clone(), *file);
            }
            Op::Remove(path) => drop(self.names.remove(path)),
            _ => {}
        }
    }
}

fn put(content: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    content.resize(content.len().max(at + bytes.len()), 0);
    content[at..at + bytes.len()].copy_from_slice(bytes);
}

/// Random failures: one in `one_in` operations fails.
struct Faults {
    random: StdRng,
    one_in: u32,
}

#[derive(Default)]
struct State {
    before: Image,
    now: Image,
    log: Vec<Op>,
    faults: Option<Faults>,
    /// The file whose next sync fails.
    fails_sync: Option<PathBuf>,
    failed: usize,
    full: usize,
}

impl State {
    /// Fails at random, because the disk is full or with another I/O error.
    fn chance(&mut self) -> io::Result<()> {
        let Some(Faults { random, one_in }) = &mut self.faults else { return Ok(()) };
        if !random.random_ratio(1, *one_in) {
            return Ok(());
        }
        let kind = if random.random() { ErrorKind::StorageFull } else { ErrorKind::Other };
        self.failed += 1;
        self.full += usize::from(kind == ErrorKind::StorageFull);
        Err(io::Error::new(kind, "injected"))
    }

    fn record(&mut self, op: Op) -> io::Result<()> {
        if let (Op::Sync(file), Some(path)) = (&op, &self.fails_sync)
            && self.now.names.get(path) == Some(file)
        {
            self.fails_sync = None;
            return Err(io::Error::other("injected"));
        }
        if let Err(error) = self.chance() {
            // A failed write may still write a part.
            if let (Op::Write(file, at, bytes), Some(faults)) = (&op, &mut self.faults) {
                let part = bytes[..faults.random.random_range(0..=bytes.len())].to_vec();
                put(&mut self.now.files[*file], *at, &part);
                self.log.push(Op::Write(*file, *at, part));
            }
            return Err(error);
        }
        match &op {
            Op::Write(file, at, bytes) => put(&mut self.now.files[*file], *at, bytes),
            Op::Length(file, length) => self.now.files[*file].resize(*length, 0),
            op => self.now.apply_to_names(op),
        }
        self.log.push(op);
        Ok(())
    }

    fn find(&self, path: &FilePath) -> io::Result<usize> {
        self.now.names.get(path).copied().ok_or_else(|| ErrorKind::NotFound.into())
    }
}

/// The simulated disk. All clones are the same disk.
#[derive(Clone, Default)]
pub(crate) struct SimDisk(Arc<Mutex<State>>);

impl fmt::Debug for SimDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("simulated disk")
    }
}

impl SimDisk {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn of(image: Image) -> Self {
        Self(Arc::new(Mutex::new(State { before: image.clone(), now: image, ..State::default() })))
    }

    /// Returns the number of operations so far.
    pub(crate) fn operations(&self) -> usize {
        self.state().log.len()
    }

    /// Returns how often a file or folder was synced so far.
    pub(crate) fn syncs(&self) -> usize {
        self.state().log.iter().filter(|op| matches!(op, Op::Sync(_) | Op::SyncFolder(_))).count()
    }

    /// From now on, lets one in `one_in` operations fail, or none.
    pub(crate) fn fail(&self, seed: u64, one_in: Option<u32>) {
        self.state().faults = one_in.map(|one_in| Faults { random: StdRng::seed_from_u64(seed), one_in });
    }

    /// Makes the next sync of a file fail.
    pub(crate) fn fail_sync(&self, path: &FilePath) {
        self.state().fails_sync = Some(path.to_owned());
    }

    /// Returns the number of operations that failed at random.
    pub(crate) fn failed(&self) -> usize {
        self.state().failed
    }

    /// Returns how many of these failed because the disk was full.
    pub(crate) fn full(&self) -> usize {
        self.state().full
    }

    /// Returns a file's content.
    pub(crate) fn content(&self, path: &FilePath) -> Option<Vec<u8>> {
        let state = self.state();
        state.find(path).ok().map(|file| state.now.files[file].clone())
    }

    /// Returns all files with their lengths.
    pub(crate) fn files(&self) -> Vec<(PathBuf, u64)> {
        let state = self.state();
        state.now.names.iter().map(|(path, file)| (path.clone(), state.now.files[*file].len() as u64)).collect()
    }

    /// Returns the disk as the process leaves it if it is killed now. Its later writes are not on that disk.
    pub(crate) fn killed(&self) -> Self {
        Self::of(self.state().now.clone())
    }

    /// Returns a disk as it may look if the power fails after the first `operations`.
    pub(crate) fn cut(&self, operations: usize, random: &mut StdRng) -> Self {
        let state = self.state();
        let mut image = state.before.clone();
        let mut names: Vec<&Op> = Vec::new();
        let mut unsynced: BTreeMap<usize, Vec<&Op>> = BTreeMap::new();
        for op in &state.log[..operations] {
            match op {
                Op::Create(_, file) => {
                    image.files.resize(image.files.len().max(file + 1), Vec::new());
                    names.push(op);
                }
                Op::Rename(..) | Op::Remove(_) => names.push(op),
                Op::SyncFolder(synced) => {
                    for op in names.extract_if(.., |op| folder(op) == Some(synced)) {
                        image.apply_to_names(op);
                    }
                }
                Op::Write(file, ..) | Op::Length(file, _) => unsynced.entry(*file).or_default().push(op),
                Op::Sync(file) => {
                    for op in unsynced.remove(file).into_iter().flatten() {
                        match op {
                            Op::Write(_, at, bytes) => put(&mut image.files[*file], *at, bytes),
                            Op::Length(_, length) => image.files[*file].resize(*length, 0),
                            _ => {}
                        }
                    }
                }
            }
        }
        // Unsynced changes of names reach the disk in order up to some point, or any of them do.
        let (until, any) = (random.random_range(0..=names.len()), random.random_ratio(1, 3));
        for (at, op) in names.into_iter().enumerate() {
            if if any { random.random() } else { at < until } {
                image.apply_to_names(op);
            }
        }
        for (file, ops) in unsynced {
            tear(&mut image.files[file], &ops, random);
        }
        Self::of(image)
    }
}

/// Returns the folder in which an operation changes a name.
fn folder(op: &Op) -> Option<&FilePath> {
    match op {
        Op::Create(path, _) | Op::Rename(_, path, _) | Op::Remove(path) => path.parent(),
        _ => None,
    }
}

/// Applies some of the operations that were not synced, so that each sector has any content that it had since the last
/// sync.
fn tear(content: &mut Vec<u8>, ops: &[&Op], random: &mut StdRng) {
    let mut lengths = vec![content.len()];
    let mut pieces: Vec<(usize, Vec<u8>)> = Vec::new();
    let mut split = |at: usize, bytes: &[u8]| {
        let mut done = 0;
        while done < bytes.len() {
            let end = (SECTOR - (at + done) % SECTOR + done).min(bytes.len());
            pieces.push((at + done, bytes[done..end].to_vec()));
            done = end;
        }
    };
    for op in ops {
        let length = lengths[lengths.len() - 1];
        match op {
            Op::Write(_, at, bytes) => {
                split(*at, bytes);
                lengths.push(length.max(at + bytes.len()));
            }
            Op::Length(_, new) => {
                if *new < length {
                    split(*new, &vec![0; length - new]);
                }
                lengths.push(*new);
            }
            _ => {}
        }
    }
    match random.random_range(0..4) {
        0 => return,
        // All writes up to some point.
        1 => pieces.truncate(random.random_range(0..=pieces.len())),
        // Any of the writes, in any order.
        2 => {
            pieces.retain(|_| random.random());
            pieces.shuffle(random);
        }
        // Each sector up to a point of its own.
        _ => {
            let mut of_sector: BTreeMap<usize, Vec<(usize, Vec<u8>)>> = BTreeMap::new();
            for piece in pieces.drain(..) {
                of_sector.entry(piece.0 / SECTOR).or_default().push(piece);
            }
            for mut history in of_sector.into_values() {
                history.truncate(random.random_range(0..=history.len()));
                pieces.append(&mut history);
            }
        }
    }
    for (at, bytes) in pieces {
        put(content, at, &bytes);
    }
    let length =
        if random.random() { lengths[lengths.len() - 1] } else { lengths[random.random_range(0..lengths.len())] };
    content.resize(length, 0);
}

impl Disk for SimDisk {
    fn open(&self, path: &FilePath, mode: OpenMode) -> io::Result<Arc<dyn DiskFile>> {
        let mut state = self.state();
        let file = match state.find(path) {
            Err(_) if matches!(mode, OpenMode::Create | OpenMode::Replace) => {
                let file = state.now.files.len();
                state.now.files.push(Vec::new());
                state.record(Op::Create(path.to_owned(), file))?;
                file
            }
            found => found?,
        };
        if mode == OpenMode::Replace {
            state.record(Op::Length(file, 0))?;
        }
        drop(state);
        Ok(Arc::new(SimFile { disk: self.clone(), file }))
    }

    fn exists(&self, path: &FilePath) -> io::Result<bool> {
        Ok(self.state().find(path).is_ok())
    }

    fn rename(&self, from: &FilePath, to: &FilePath) -> io::Result<()> {
        let mut state = self.state();
        let file = state.find(from)?;
        state.record(Op::Rename(from.to_owned(), to.to_owned(), file))
    }

    fn remove(&self, path: &FilePath) -> io::Result<()> {
        let mut state = self.state();
        state.find(path)?;
        state.record(Op::Remove(path.to_owned()))
    }

    fn names(&self, folder: &FilePath) -> io::Result<Vec<String>> {
        let state = self.state();
        let paths = state.now.names.keys().filter(|path| path.parent() == Some(folder));
        Ok(paths.filter_map(|path| Some(path.file_name()?.to_str()?.to_owned())).collect())
    }

    fn make_folder(&self, _: &FilePath) -> io::Result<()> {
        Ok(())
    }

    fn sync_folder(&self, folder: &FilePath) -> io::Result<()> {
        self.state().record(Op::SyncFolder(folder.to_owned()))
    }
}

#[derive(Debug)]
struct SimFile {
    disk: SimDisk,
    file: usize,
}

impl DiskFile for SimFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.disk.state().now.files[self.file].len() as u64)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let state = self.disk.state();
        let (content, at) = (&state.now.files[self.file], offset as usize);
        let found = content.get(at..at + buffer.len()).ok_or(ErrorKind::UnexpectedEof)?;
        buffer.copy_from_slice(found);
        Ok(())
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.disk.state().record(Op::Write(self.file, offset as usize, bytes.to_vec()))
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.disk.state().record(Op::Length(self.file, length as usize))
    }

    fn sync(&self) -> io::Result<()> {
        self.disk.state().record(Op::Sync(self.file))
    }

    fn try_lock(&self) -> io::Result<bool> {
        Ok(true)
    }

    fn is_at(&self, path: &FilePath) -> io::Result<bool> {
        Ok(self.disk.state().now.names.get(path) == Some(&self.file))
    }
}
