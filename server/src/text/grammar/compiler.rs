//! Compiles grammars within limits.
//!
//! Grammars come from clients. Their size and depth are checked first. Then a helper process compiles the grammar
//! within limits on time and memory. Only a grammar that the helper has compiled is compiled in this process, where it
//! takes as little. Without a helper, as in tests, the request stops waiting after [`MAX_TIME`], but the compilation
//! cannot be stopped.
//!
//! JSON has one space after each colon and comma and no other whitespace. So a confused model cannot fill an answer
//! with line breaks, and the characters between values need not be sampled.

use std::sync::{Arc, Condvar, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Instant;

use llguidance::ParserFactory;
use sha2::{Digest as _, Sha256};

use super::build::{self, STACK_BYTES};
use super::cache::{Cache, Digest};
use super::check;
use super::helpers::{HelperCommand, Helpers, Probe};
use super::matcher::CompiledGrammar;
use super::memory::Memory;
use super::spec::{GrammarError, GrammarSpec, MAX_COMPILERS, MAX_TIME};
use crate::priority;
use crate::text::encoder::Encode;
use crate::text::vocabulary::Vocabulary;

/// Compiles grammars for one vocabulary, and caches the most recent ones.
pub struct Grammars {
    shared: Arc<Shared>,
    helpers: Option<Helpers>,
    cache: Cache<CompiledGrammar>,
}

/// State of the compiling threads, which may outlive the requests that started them.
struct Shared {
    factory: ParserFactory,
    eos: Arc<[u32]>,
    memory: Arc<Memory>,
    permits: Mutex<usize>,
    freed: Condvar,
}

impl Grammars {
    /// Creates a compiler for texts of `vocabulary` that end with a token of `eos`. Tokens without bytes occur in no
    /// text. Text that a grammar forces becomes the tokens that `encode` gives.
    ///
    /// # Errors
    /// The vocabulary does not support grammars.
    pub fn new(vocabulary: &Vocabulary, eos: &Arc<[u32]>, encode: &Encode) -> Result<Self, GrammarError> {
        let (factory, eos) = (build::factory(vocabulary, eos, Arc::clone(encode))?, Arc::clone(eos));
        let (permits, freed) = (Mutex::new(MAX_COMPILERS), Condvar::new());
        let shared = Arc::new(Shared { factory, eos, memory: Arc::default(), permits, freed });
        Ok(Self { shared, helpers: None, cache: Cache::default() })
    }

    /// Creates a compiler that first tries each grammar in a process started with `helper`.
    ///
    /// # Errors
    /// The vocabulary does not support grammars.
    pub fn with_helper(
        vocabulary: &Vocabulary,
        eos: &Arc<[u32]>,
        encode: &Encode,
        helper: HelperCommand,
    ) -> Result<Self, GrammarError> {
        let helpers =
            Helpers::new(helper, vocabulary, eos).map_err(|error| GrammarError::Vocabulary(error.to_string()))?;
        Ok(Self { helpers: Some(helpers), ..Self::new(vocabulary, eos, encode)? })
    }

    /// Returns the compiled `spec`, if it is in the cache.
    ///
    /// # Errors
    /// The grammar exceeds a limit that is checked before compilation.
    pub fn cached(&self, spec: &GrammarSpec) -> Result<Option<Arc<CompiledGrammar>>, GrammarError> {
        check::check(spec)?;
        Ok(self.cache.find(&digest(spec)))
    }

    /// Compiles `spec`, or finds it in the cache. May block for some seconds, so call it only on threads that may
    /// block. If there are more callers than [`MAX_COMPILERS`], they wait for each other in no particular order.
    ///
    /// # Errors
    /// The grammar is invalid, unsupported, or exceeds a limit.
    pub fn compile(&self, spec: &GrammarSpec) -> Result<Arc<CompiledGrammar>, GrammarError> {
        check::check(spec)?;
        let digest = digest(spec);
        if let Some(cached) = self.cache.find(&digest) {
            return Ok(cached);
        }
        let permit = Permit::wait(&self.shared)?;
        // Another caller may have compiled it in the meantime.
        if let Some(cached) = self.cache.find(&digest) {
            return Ok(cached);
        }
        let probed = match (&self.helpers, spec) {
            // This is always the same small grammar.
            (None, _) | (_, GrammarSpec::JsonObject) => Probe::default(),
            (Some(helpers), spec) => helpers.probe(spec)?,
        };
        let compiled = Arc::new(compile_here(permit, spec.clone(), probed.long)?);
        self.cache.add(digest, probed.bytes.max(compiled.bytes() as u64), &compiled);
        Ok(compiled)
    }
}

fn digest(spec: &GrammarSpec) -> Digest {
    Sha256::digest(format!("{spec:?}")).into()
}

/// Compiles `spec` in this process, on a thread whose stack suffices for every permitted depth. If `long`, the thread
/// runs at a lower priority.
fn compile_here(permit: Permit, spec: GrammarSpec, long: bool) -> Result<CompiledGrammar, GrammarError> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let compiling = thread::Builder::new().name("grammar".into()).stack_size(STACK_BYTES).spawn(move || {
        if long {
            priority::lower_thread();
        }
        let Shared { factory, eos, memory, .. } = &*permit.0;
        let compiled = build::compile(factory, &spec);
        let compiled = compiled.map(|begin| CompiledGrammar::new(begin, Arc::clone(eos), Arc::clone(memory)));
        drop(permit);
        // The request may have stopped waiting.
        let _ = sender.send(compiled);
    });
    compiling.map_err(|_| GrammarError::Busy)?;
    // At a lower priority, it may take as long as other work makes it. The helper has shown that it ends, and giving up
    // would lose the permit and the result.
    let received = if long {
        receiver.recv().map_err(|_| mpsc::RecvTimeoutError::Disconnected)
    } else {
        receiver.recv_timeout(MAX_TIME)
    };
    match received {
        Ok(compiled) => compiled,
        Err(mpsc::RecvTimeoutError::Timeout) => Err(GrammarError::Slow),
        Err(mpsc::RecvTimeoutError::Disconnected) => Err(GrammarError::Wrong("its compiler failed".into())),
    }
}

/// A permit to compile, returned when it is dropped.
struct Permit(Arc<Shared>);

impl Permit {
    fn wait(shared: &Arc<Shared>) -> Result<Self, GrammarError> {
        let deadline = Instant::now() + MAX_TIME;
        let mut permits = shared.permits.lock().unwrap_or_else(PoisonError::into_inner);
        while *permits == 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(GrammarError::Busy);
            }
            permits = shared.freed.wait_timeout(permits, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        *permits -= 1;
        Ok(Self(Arc::clone(shared)))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        *self.0.permits.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.freed.notify_one();
    }
}
