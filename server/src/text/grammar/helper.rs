//! The helper process, which compiles grammars before the server does, to find out whether they can be compiled.
//!
//! llguidance cannot be interrupted while it compiles, and its memory has no bound. A process can be killed, and the
//! system bounds its memory: an allocation beyond the bound ends only the helper.

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

/// Processor time that a helper may use in its whole life, in seconds.
const MAX_CPU: u64 = 300;

/// Address space that the allocator may reserve beyond the memory that it uses.
const RESERVED: u64 = 256 << 20;

/// Growth in memory after which a helper ends once it has answered: memory that it freed but still holds would hide
/// what the next grammar uses.
const MAX_GROWTH: u64 = 16 << 20;

/// A compilation that takes more processor time than this is given a lower priority than the server and small grammars.
const LONG: Duration = Duration::from_millis(100);

/// State shared by the compiling thread and the thread that watches it.
#[derive(Clone, Default)]
struct Watch(Arc<Mutex<Compilation>>);

#[derive(Default)]
struct Compilation {
    runs: bool,
    /// Whether the priority of this process has been lowered.
    lowered: bool,
}

impl Watch {
    fn lock(&self) -> MutexGuard<'_, Compilation> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self) {
        self.lock().runs = true;
    }

    /// Lowers the priority of this process, once, if a compilation is running.
    fn give_way(&self) {
        let mut compilation = self.lock();
        if compilation.runs && !compilation.lowered {
            priority::lower_process();
            compilation.lowered = true;
        }
    }

    /// Ends the compilation. Returns whether the priority has been lowered, which lasts for the life of the process.
    fn end(&self) -> bool {
        let mut compilation = self.lock();
        compilation.runs = false;
        compilation.lowered
    }
}

/// Compiles the grammars from standard input until it ends, and writes the result of each to standard output. The
/// command `tidegate compile-grammars` runs this.
///
/// # Errors
/// The vocabulary cannot be read, a pipe breaks, or a compilation takes too long.
pub fn compile_grammars() -> io::Result<()> {
    // Whatever a client makes this process do, it leaves no core file behind.
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
            // The server kills a helper that takes too long. This is for a helper whose server has died.
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

/// Returns the processor time of this process so far; zero if the system does not report it.
fn processor_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // After the name, which may contain spaces: fields 12 and 13, in hundredths of a second.
    let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields).split(' ');
    Duration::from_millis(10 * fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum::<u64>())
}

/// Compiles the grammars that arrive. `clock` gets a message when a compilation begins and when it has ended.
fn serve(mut from: impl Read, mut to: impl Write, clock: &Sender<()>, watch: &Watch) -> io::Result<()> {
    let (vocabulary, eos) = protocol::read_vocabulary(&mut from)?;
    // The helper has no tokenizer and generates nothing, so longest matches will do.
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
        // Nobody receives this if the process is about to end.
        let _ = clock.send(());
        let compiled = probe(&factory, &spec);
        let long = watch.end();
        let _ = clock.send(());
        // The next grammar may be small, and should get a helper with its full priority and memory.
        let last = long || Memory::now().resident.saturating_sub(begun.resident) > MAX_GROWTH;
        answer = Answer { compiled, long, last };
    }
    protocol::write(&mut to, &serde_json::to_vec(&answer)?)
}

/// Returns how many bytes the compiled grammar adds to this process, or why it was refused.
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

/// Sets a soft limit. If the system does not support it, the server's clock still bounds the time.
fn limit(resource: Resource, most: u64) {
    let maximum = rustix::process::getrlimit(resource).maximum;
    let current = Some(maximum.map_or(most, |maximum| maximum.min(most)));
    let _ = setrlimit(resource, Rlimit { current, maximum });
}

/// The memory of this process in bytes; zeros if the system does not report it.
#[derive(Default)]
struct Memory {
    /// Size of the address space.
    size: u64,
    /// Private writable memory.
    data: u64,
    /// Resident memory.
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
