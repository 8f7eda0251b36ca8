//! The helper process, which compiles grammars before the server does, to find out whether it can.
//!
//! llguidance cannot be interrupted while it compiles, and its memory has no bound. A process can be killed, and the
//! system bounds its memory: an allocation beyond the bound ends the helper and nothing else.

use std::io::{self, Read, Write};
use std::process;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use llguidance::ParserFactory;
use rustix::process::{Resource, Rlimit, setrlimit};

use super::build::{self, STACK_BYTES};
use super::protocol::{self, Answer};
use super::spec::{GrammarError, GrammarSpec, MAX_MEMORY, MAX_TIME};
use crate::priority;

/// Processor time of a helper's whole life, in seconds.
const MAX_CPU: u64 = 300;

/// Address space that the allocator may reserve beyond what it uses.
const RESERVED: u64 = 256 << 20;

/// A helper whose memory has grown by this much ends after its answer: memory that it freed but still holds would
/// hide what the next grammar uses.
const MAX_GROWTH: u64 = 16 << 20;

/// A compilation that takes more processor time gives way to the server, and to the compilations of small grammars.
const LONG: Duration = Duration::from_millis(100);

/// What the thread that compiles and the one that watches it know of each other.
#[derive(Clone, Default)]
struct Watch(Arc<Mutex<Compilation>>);

#[derive(Default)]
struct Compilation {
    runs: bool,
    /// Whether the priority of this process was lowered.
    lowered: bool,
}

impl Watch {
    fn lock(&self) -> MutexGuard<'_, Compilation> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self) {
        self.lock().runs = true;
    }

    /// Lowers the priority of this process, once, if a compilation runs.
    fn give_way(&self) {
        let mut compilation = self.lock();
        if compilation.runs && !compilation.lowered {
            priority::lower_process();
            compilation.lowered = true;
        }
    }

    /// Whether the priority has been lowered, for ever.
    fn end(&self) -> bool {
        let mut compilation = self.lock();
        compilation.runs = false;
        compilation.lowered
    }
}

/// Compiles the grammars that come from standard input until it ends, and writes to standard output what became of each.
/// The command `tidegate compile-grammars` runs it.
///
/// # Errors
/// The vocabulary cannot be read, a pipe breaks, or a compilation takes too long.
pub fn compile_grammars() -> io::Result<()> {
    // Whatever a client makes this process do, it leaves no file behind.
    limit(Resource::Core, 0);
    limit(Resource::Cpu, MAX_CPU);
    let (sender, receiver) = mpsc::channel();
    let watch = Watch::default();
    let watched = watch.clone();
    let compiling = thread::Builder::new()
        .stack_size(STACK_BYTES)
        .spawn(move || serve(io::stdin().lock(), io::stdout().lock(), &sender, &watched))?;
    while receiver.recv().is_ok() {
        let (begun, worked) = (Instant::now(), processor_time());
        while receiver.recv_timeout(LONG) == Err(RecvTimeoutError::Timeout) {
            // The server kills a helper that takes too long. This is for helpers whose server has died.
            if begun.elapsed() > 2 * MAX_TIME {
                process::exit(1);
            }
            if processor_time().saturating_sub(worked) >= LONG {
                watch.give_way();
            }
        }
    }
    compiling.join().map_err(|_| io::ErrorKind::Other)?
}

/// The processor time of this process so far; zero where the system does not tell.
fn processor_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // After the name, which may contain spaces: the 12th and the 13th field, in hundredths of a second.
    let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields).split(' ');
    Duration::from_millis(10 * fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum::<u64>())
}

/// Serves the grammars; `clock` is told when a compilation begins and when it has ended.
fn serve(mut from: impl Read, mut to: impl Write, clock: &Sender<()>, watch: &Watch) -> io::Result<()> {
    let (vocabulary, eos) = protocol::read_vocabulary(&mut from)?;
    // It has no tokenizer, and generates nothing: longest matches will do.
    let factory = build::factory(&vocabulary, &eos, Arc::new(|_| Vec::new())).map_err(io::Error::other)?;
    drop(vocabulary);
    let begun = Memory::now();
    let mut answer = Answer { compiled: Ok(0), long: false, last: false };
    while !answer.last {
        protocol::write(&mut to, &serde_json::to_vec(&answer)?)?;
        let spec = match protocol::read_json(&mut from) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            spec => spec?,
        };
        watch.begin();
        // Nobody listens where the process is about to end.
        let _ = clock.send(());
        let compiled = probe(&factory, &spec);
        let long = watch.end();
        let _ = clock.send(());
        // The next grammar may be small, and gets a helper that has its full priority and memory.
        let last = long || Memory::now().resident.saturating_sub(begun.resident) > MAX_GROWTH;
        answer = Answer { compiled, long, last };
    }
    protocol::write(&mut to, &serde_json::to_vec(&answer)?)
}

/// The bytes that the compiled grammar adds to this process, or why it was refused.
fn probe(factory: &ParserFactory, spec: &GrammarSpec) -> Result<u64, String> {
    let before = Memory::now();
    if before.data > 0 {
        limit(Resource::Data, before.data + MAX_MEMORY);
        limit(Resource::As, before.size + MAX_MEMORY + RESERVED);
    }
    let compiled = build::compile(factory, spec).map_err(|error| match error {
        GrammarError::Wrong(reason) => reason,
        error => error.to_string(),
    })?;
    let after = Memory::now();
    drop(compiled);
    Ok(after.resident.saturating_sub(before.resident))
}

/// Sets a soft limit. Where the system does not have it, the server's clock still bounds the time.
fn limit(resource: Resource, most: u64) {
    let maximum = rustix::process::getrlimit(resource).maximum;
    let current = Some(maximum.map_or(most, |maximum| maximum.min(most)));
    let _ = setrlimit(resource, Rlimit { current, maximum });
}

/// The memory of this process in bytes; zeros where the system does not tell.
#[derive(Default)]
struct Memory {
    /// Address space.
    size: u64,
    /// Private memory that can be written.
    data: u64,
    /// Memory in use.
    resident: u64,
}

impl Memory {
    fn now() -> Self {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
            kib.unwrap_or(0) << 10
        };
        Self { size: field("VmSize"), data: field("VmData"), resident: field("VmRSS") }
    }
}
