//! The server's side of the helper processes: a few warm ones, each killed if a grammar takes too long.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::process::Signal;

use super::protocol::{self, Answer};
use super::spec::{GrammarError, GrammarSpec, MAX_COMPILERS, MAX_TIME};
use crate::text::vocabulary::Vocabulary;

/// How long a helper may take to start.
const MAX_START: Duration = Duration::from_secs(10);

/// Grammars that a helper compiles before it is replaced.
const MAX_GRAMMARS: usize = 100;

/// The command that runs [`super::compile_grammars`].
#[derive(Clone, Debug)]
pub struct HelperCommand {
    /// The program.
    pub program: OsString,
    /// Its arguments.
    pub args: Vec<OsString>,
}

/// What compiling a grammar takes.
#[derive(Clone, Copy, Default)]
pub(super) struct Probe {
    /// The size of the compiled grammar in bytes.
    pub(super) bytes: u64,
    /// Whether the compilation takes long and must run at a lower priority.
    pub(super) long: bool,
}

/// Helper processes for one vocabulary. At most [`MAX_COMPILERS`] callers use them at once.
pub(super) struct Helpers {
    command: HelperCommand,
    /// The first thing that a helper is sent.
    vocabulary: Arc<[u8]>,
    idle: Mutex<Vec<Helper>>,
}

impl Helpers {
    pub(super) fn new(command: HelperCommand, vocabulary: &Vocabulary, eos: &[u32]) -> io::Result<Self> {
        let vocabulary = protocol::vocabulary_frames(vocabulary, eos)?.into();
        Ok(Self { command, vocabulary, idle: Mutex::default() })
    }

    /// Compiles `spec` in a helper, to find out what compiling it takes.
    pub(super) fn probe(&self, spec: &GrammarSpec) -> Result<Probe, GrammarError> {
        let spec = serde_json::to_vec(spec).map_err(|error| GrammarError::Wrong(error.to_string()))?;
        let mut helper = self.take()?;
        let mut answer = helper.ask(spec.clone(), MAX_TIME);
        if answer == Err(Unanswered::Killed) {
            // This says nothing about the grammar, so it is tried once more. If the system kills that helper too, it is
            // short of memory.
            helper = self.take()?;
            answer = helper.ask(spec, MAX_TIME);
        }
        let usable = answer.as_ref().is_ok_and(|answer| !answer.last) && helper.grammars < MAX_GRAMMARS;
        self.put_back(usable.then_some(helper));
        let Answer { compiled, long, .. } = answer.map_err(|unanswered| match unanswered {
            Unanswered::Late => GrammarError::Slow,
            Unanswered::Failed | Unanswered::Killed => GrammarError::Memory,
        })?;
        compiled.map(|bytes| Probe { bytes, long }).map_err(GrammarError::Wrong)
    }

    /// Keeps a helper for the next grammar. If the helper is used up, starts another, unless one is idle already: the
    /// next grammar may be from another client, who would otherwise wait for the start.
    fn put_back(&self, helper: Option<Helper>) {
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let helper = match helper {
            None if idle().is_empty() => self.start().ok(),
            helper => helper,
        };
        let mut idle = idle();
        if idle.len() < MAX_COMPILERS {
            idle.extend(helper);
        }
    }

    fn start(&self) -> io::Result<Helper> {
        Helper::start(&self.command, Arc::clone(&self.vocabulary))
    }

    /// Returns a running helper.
    fn take(&self) -> Result<Helper, GrammarError> {
        loop {
            let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let Some(mut helper) = idle else { break };
            // Skips helpers that something else has ended. If one ends right now, that shows when it does not answer.
            if matches!(helper.child.try_wait(), Ok(None)) {
                return Ok(helper);
            }
        }
        self.start().map_err(|error| {
            tracing::error!("cannot start the process that compiles grammars, {:?}: {error}", self.command);
            GrammarError::Unavailable
        })
    }
}

/// Why a helper did not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unanswered {
    /// It took too long.
    Late,
    /// It ended by itself: an allocation was refused, or the stack was too small.
    Failed,
    /// Something outside the helper has killed it.
    Killed,
}

/// A helper process, killed when it is dropped.
struct Helper {
    child: Child,
    requests: SyncSender<Vec<u8>>,
    answers: Receiver<Answer>,
    /// Number of grammars that it was asked to compile.
    grammars: usize,
}

impl Helper {
    fn start(command: &HelperCommand, vocabulary: Arc<[u8]>) -> io::Result<Self> {
        let mut child = Command::new(&command.program)
            .arg0("tidegate")
            .args(&command.args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // The error output may contain a client's grammar, which must not reach the log.
            .stderr(Stdio::null())
            // Keeps signals that a terminal sends to the server from ending the helper.
            .process_group(0)
            .spawn()?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let (requests, waiting) = mpsc::sync_channel::<Vec<u8>>(1);
        let (sender, answers) = mpsc::sync_channel(1);
        let mut helper = Self { child, requests, answers, grammars: 0 };
        let (Some(mut stdin), Some(mut stdout)) = (stdin, stdout) else { return Err(io::ErrorKind::BrokenPipe.into()) };
        // Pipes have no timeouts, but channels do.
        thread::Builder::new().name("grammar-helper".into()).spawn(move || -> io::Result<()> {
            io::Write::write_all(&mut stdin, &vocabulary)?;
            loop {
                let Ok(()) = sender.send(protocol::read_json(&mut stdout)?) else { return Ok(()) };
                let Ok(request) = waiting.recv() else { return Ok(()) };
                protocol::write(&mut stdin, &request)?;
            }
        })?;
        match helper.answers.recv_timeout(MAX_START) {
            Ok(_) => Ok(helper),
            Err(RecvTimeoutError::Timeout) => Err(io::ErrorKind::TimedOut.into()),
            Err(RecvTimeoutError::Disconnected) => {
                let status = helper.child.wait()?;
                Err(io::Error::other(format!("it ended with {status}")))
            }
        }
    }

    fn ask(&mut self, request: Vec<u8>, limit: Duration) -> Result<Answer, Unanswered> {
        self.grammars += 1;
        let sent = self.requests.send(request).map_err(|_| RecvTimeoutError::Disconnected);
        sent.and_then(|()| self.answers.recv_timeout(limit)).map_err(|error| match error {
            RecvTimeoutError::Timeout => Unanswered::Late,
            RecvTimeoutError::Disconnected => self.cause(),
        })
    }

    /// Returns why a helper that has closed its pipes ended.
    fn cause(&mut self) -> Unanswered {
        // If the process has already ended, this does not change its status; if not, it must not be waited for.
        let _ = self.child.kill();
        match self.child.wait() {
            Ok(status) if status.signal() == Some(Signal::KILL.as_raw()) => Unanswered::Killed,
            _ => Unanswered::Failed,
        }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        // An error means that it has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
