//! Grammars for answers: from what a request says to a compiled grammar, within bounds.
//!
//! What is compiled comes from clients. So it is bounded in size and depth before it is looked at, compiled on a thread
//! of its own with a stack that no depth within the bounds fills, and waited for no longer than [`MAX_TIME`].
//! What a text goes through with a grammar stands in `grammar/matcher.rs`.
//!
//! In JSON, a blank may stand wherever whitespace may, one and no more: a model that has lost its way cannot fill an
//! answer with line feeds.

mod bounds;
mod build;
mod calls;
mod matcher;

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use llguidance::ParserFactory;
use llguidance::toktrie::{ApproximateTokEnv, INVALID_TOKEN, TokEnv, TokRxInfo, TokTrie};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::Vocabulary;

pub use self::calls::{Call, Calls};
pub use self::matcher::{CompiledGrammar, GrammarMatcher, OffGrammar};

/// Longest grammar of any kind, in bytes.
pub const MAX_GRAMMAR_BYTES: usize = 256 << 10;

/// Most levels of nesting in a grammar.
pub const MAX_GRAMMAR_DEPTH: usize = 100;

/// Most texts to choose from.
pub const MAX_CHOICES: usize = 1024;

/// How long one waits for a grammar.
const MAX_TIME: Duration = Duration::from_secs(2);

/// Grammars that are compiled at once, those among them that nobody waits for any more.
const COMPILERS: usize = 2;

/// Compiled grammars that are kept: agents send the same one each time.
const KEPT: usize = 64;

/// Only the part that is used takes memory.
const STACK_BYTES: usize = 256 << 20;

/// What an answer is to follow, whole.
#[derive(Clone, Debug, PartialEq)]
pub enum GrammarSpec {
    /// JSON that this schema allows.
    JsonSchema(Value),
    /// Any JSON object.
    JsonObject,
    /// A text that this regular expression matches from its beginning to its end.
    Regex(String),
    /// A grammar in llguidance's dialect of Lark, without tokens by name or number.
    Lark(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// Calls of tools.
    Calls(Calls),
}

/// Why a grammar was refused. The words go on after the name of the parameter: "must …".
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// Too many bytes.
    #[error("must be at most {most} bytes long, found {bytes}")]
    Long {
        /// How many there may be; less than [`MAX_GRAMMAR_BYTES`] for some kinds of grammars.
        most: usize,
        /// How many there are.
        bytes: usize,
    },
    /// Nested too deeply.
    #[error("must be nested at most {MAX_GRAMMAR_DEPTH} levels deep")]
    Deep,
    /// The wrong number of choices.
    #[error("must hold from 1 to {MAX_CHOICES} texts, none of them empty")]
    Choices,
    /// Something that this server does not let a grammar have.
    #[error("must not have {0}")]
    Has(String),
    /// Not a grammar of its kind, or one that asks for what is not supported.
    #[error("must be a grammar that can be followed: {0}")]
    Wrong(String),
    /// More than the compiler's limits.
    #[error("must be compiled within {} s: it takes longer", MAX_TIME.as_secs())]
    Slow,
    /// No grammar can be laid over the vocabulary.
    #[error("the vocabulary does not do for grammars: {0}")]
    Vocabulary(String),
    /// Others' grammars take their time.
    #[error("cannot be compiled now: {COMPILERS} other grammars are being compiled")]
    Busy,
}

/// Compiles grammars for one vocabulary, and keeps those that were compiled last.
pub struct Grammars {
    shared: Arc<Shared>,
    kept: Mutex<VecDeque<([u8; 32], Arc<CompiledGrammar>)>>,
}

/// What compiling threads share, also when nobody waits for them any more.
struct Shared {
    factory: ParserFactory,
    eos: Arc<[u32]>,
    places: Mutex<usize>,
    freed: Condvar,
}

impl Grammars {
    /// For texts of the tokens of `vocabulary` that end with a token of `eos`. Tokens without bytes are in no text.
    ///
    /// # Errors
    /// A vocabulary that no grammar can be laid over.
    pub fn new(vocabulary: &Vocabulary, eos: &Arc<[u32]>) -> Result<Self, GrammarError> {
        let factory = factory(vocabulary, eos).map_err(GrammarError::Vocabulary)?;
        let shared = Shared { factory, eos: Arc::clone(eos), places: Mutex::new(COMPILERS), freed: Condvar::new() };
        Ok(Self { shared: Arc::new(shared), kept: Mutex::default() })
    }

    /// Compiles `spec`, or finds it among those that were compiled last. Blocks for up to 4 s: to be
    /// called off the threads that others wait for.
    ///
    /// # Errors
    /// A grammar that is wrong, unsupported, or more than the bounds allow.
    pub fn compile(&self, spec: &GrammarSpec) -> Result<Arc<CompiledGrammar>, GrammarError> {
        bounds::check(spec)?;
        let digest: [u8; 32] = Sha256::digest(format!("{spec:?}")).into();
        if let Some(kept) = self.find(&digest) {
            return Ok(kept);
        }
        let place = Place::wait(&self.shared)?;
        let (sender, receiver) = mpsc::sync_channel(1);
        let spec = spec.clone();
        let compiling = thread::Builder::new().name("grammar".into()).stack_size(STACK_BYTES).spawn(move || {
            let compiled = build::compile(&place.0.factory, &place.0.eos, spec);
            drop(place);
            // Who has waited too long is not there any more.
            let _ = sender.send(compiled);
        });
        compiling.map_err(|_| GrammarError::Busy)?;
        let compiled = match receiver.recv_timeout(MAX_TIME) {
            Ok(compiled) => Arc::new(compiled?),
            Err(mpsc::RecvTimeoutError::Timeout) => return Err(GrammarError::Slow),
            Err(mpsc::RecvTimeoutError::Disconnected) => return Err(GrammarError::Wrong("its compiler failed".into())),
        };
        let mut kept = self.kept();
        kept.push_front((digest, Arc::clone(&compiled)));
        kept.truncate(KEPT);
        Ok(compiled)
    }

    fn find(&self, digest: &[u8; 32]) -> Option<Arc<CompiledGrammar>> {
        let mut kept = self.kept();
        let found = kept.iter().position(|(known, _)| known == digest).and_then(|at| kept.remove(at))?;
        let compiled = Arc::clone(&found.1);
        kept.push_front(found);
        Some(compiled)
    }

    fn kept(&self) -> MutexGuard<'_, VecDeque<([u8; 32], Arc<CompiledGrammar>)>> {
        // Nothing panics while it holds the lock.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The leave to compile, given back when it is dropped, on whichever thread.
struct Place(Arc<Shared>);

impl Place {
    fn wait(shared: &Arc<Shared>) -> Result<Self, GrammarError> {
        let until = Instant::now() + MAX_TIME;
        let mut places = shared.places.lock().unwrap_or_else(PoisonError::into_inner);
        while *places == 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(GrammarError::Busy);
            }
            places = shared.freed.wait_timeout(places, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        *places -= 1;
        Ok(Self(Arc::clone(shared)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        *self.0.places.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.freed.notify_one();
    }
}

fn factory(vocabulary: &Vocabulary, eos: &[u32]) -> Result<ParserFactory, String> {
    let mut words: Vec<Vec<u8>> = vocabulary.tokens().map(<[u8]>::to_vec).collect();
    for (id, word) in words.iter_mut().enumerate() {
        // A word that begins with this byte would be taken for a special token; UTF-8 has no such byte.
        let special = word.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER);
        if special || eos.iter().any(|eos| *eos as usize == id) {
            word.clear();
        }
    }
    let size = u32::try_from(words.len()).map_err(|error| error.to_string())?;
    let trie = TokTrie::from(&TokRxInfo::new(size, INVALID_TOKEN), &words);
    let trie = if eos.is_empty() { trie } else { trie.with_eos_tokens(eos) };
    // Not canonical: any tokens are right whose bytes are right, and nothing is forced.
    let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let mut factory = ParserFactory::new_simple(&environment).map_err(|error| error.to_string())?;
    factory.quiet();
    *factory.limits_mut() = build::limits();
    Ok(factory)
}
