//! Compiles grammars within limits.
//!
//! Grammars come from clients. Their size and depth are checked first. Compilation then runs on its own thread, with a
//! stack that suffices for every permitted depth, and the request waits for at most [`MAX_TIME`].
//!
//! In JSON, at most one space may stand where whitespace is allowed, so that a confused model cannot fill an answer with
//! line breaks.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::Instant;

use llguidance::ParserFactory;
use llguidance::toktrie::{ApproximateTokEnv, INVALID_TOKEN, TokEnv, TokRxInfo, TokTrie};
use sha2::{Digest, Sha256};

use super::matcher::CompiledGrammar;
use super::spec::{GrammarError, GrammarSpec, MAX_COMPILERS, MAX_TIME};
use super::{build, check};
use crate::text::vocabulary::Vocabulary;

/// Size of the cache of compiled grammars. Agents send the same grammar with each request.
const CACHE_SIZE: usize = 64;

/// Stack of a compiling thread. Only the part that is used takes memory.
const STACK_BYTES: usize = 256 << 20;

/// Compiles grammars for one vocabulary, and caches the most recent ones.
pub struct Grammars {
    shared: Arc<Shared>,
    cache: Mutex<VecDeque<([u8; 32], Arc<CompiledGrammar>)>>,
}

/// State of the compiling threads, which may outlive the requests that started them.
struct Shared {
    factory: ParserFactory,
    eos: Arc<[u32]>,
    permits: Mutex<usize>,
    freed: Condvar,
}

impl Grammars {
    /// A compiler for texts of `vocabulary` that end with a token of `eos`. Tokens without bytes occur in no text.
    ///
    /// # Errors
    /// The vocabulary does not support grammars.
    pub fn new(vocabulary: &Vocabulary, eos: &Arc<[u32]>) -> Result<Self, GrammarError> {
        let factory = factory(vocabulary, eos).map_err(GrammarError::Vocabulary)?;
        let shared =
            Shared { factory, eos: Arc::clone(eos), permits: Mutex::new(MAX_COMPILERS), freed: Condvar::new() };
        Ok(Self { shared: Arc::new(shared), cache: Mutex::default() })
    }

    /// Compiles `spec`, or finds it in the cache. Blocks for up to 4 s, so call it only on threads that may block.
    ///
    /// # Errors
    /// The grammar is invalid, unsupported, or exceeds a limit.
    pub fn compile(&self, spec: &GrammarSpec) -> Result<Arc<CompiledGrammar>, GrammarError> {
        check::check(spec)?;
        let digest: [u8; 32] = Sha256::digest(format!("{spec:?}")).into();
        if let Some(cached) = self.find(&digest) {
            return Ok(cached);
        }
        let permit = Permit::wait(&self.shared)?;
        let (sender, receiver) = mpsc::sync_channel(1);
        let spec = spec.clone();
        let compiling = thread::Builder::new().name("grammar".into()).stack_size(STACK_BYTES).spawn(move || {
            let compiled = build::compile(&permit.0.factory, &permit.0.eos, spec);
            drop(permit);
            // The request may have stopped waiting.
            let _ = sender.send(compiled);
        });
        compiling.map_err(|_| GrammarError::Busy)?;
        let compiled = match receiver.recv_timeout(MAX_TIME) {
            Ok(compiled) => Arc::new(compiled?),
            Err(mpsc::RecvTimeoutError::Timeout) => return Err(GrammarError::Slow),
            Err(mpsc::RecvTimeoutError::Disconnected) => return Err(GrammarError::Wrong("its compiler failed".into())),
        };
        let mut cache = self.cache();
        cache.push_front((digest, Arc::clone(&compiled)));
        cache.truncate(CACHE_SIZE);
        Ok(compiled)
    }

    fn find(&self, digest: &[u8; 32]) -> Option<Arc<CompiledGrammar>> {
        let mut cache = self.cache();
        let found = cache.iter().position(|(known, _)| known == digest).and_then(|at| cache.remove(at))?;
        let compiled = Arc::clone(&found.1);
        cache.push_front(found);
        Some(compiled)
    }

    fn cache(&self) -> MutexGuard<'_, VecDeque<([u8; 32], Arc<CompiledGrammar>)>> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
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

fn factory(vocabulary: &Vocabulary, eos: &[u32]) -> Result<ParserFactory, String> {
    let mut words: Vec<Vec<u8>> = vocabulary.tokens().map(<[u8]>::to_vec).collect();
    for (id, word) in words.iter_mut().enumerate() {
        // llguidance would treat a word that begins with this byte as a special token. UTF-8 never uses the byte.
        let special = word.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER);
        if special || eos.iter().any(|eos| *eos as usize == id) {
            word.clear();
        }
    }
    let size = u32::try_from(words.len()).map_err(|error| error.to_string())?;
    let trie = TokTrie::from(&TokRxInfo::new(size, INVALID_TOKEN), &words);
    let trie = if eos.is_empty() { trie } else { trie.with_eos_tokens(eos) };
    // Not canonical: any tokens with the right bytes are accepted, and no token is forced.
    let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let mut factory = ParserFactory::new_simple(&environment).map_err(|error| error.to_string())?;
    factory.quiet();
    *factory.limits_mut() = build::limits();
    Ok(factory)
}
