//! A compiled grammar, and the position of one text in it.

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use llguidance::TokenParser;
use llguidance::api::StopReason;
use llguidance::panic_utils::catch_unwind;

use super::memory::{Memory, Share};

/// Bytes per item of the parser, with room to grow.
const ITEM_BYTES: usize = 16;

/// Bytes that the parser keeps per byte of the text, with room to grow.
const BYTES_PER_BYTE: usize = 64;

/// Why a text cannot continue in its grammar. The message is meant for the log.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct OffGrammar(String);

/// A compiled grammar, shared by any number of texts.
pub struct CompiledGrammar {
    /// The parser at the beginning of a text.
    begin: TokenParser,
    eos: Arc<[u32]>,
    memory: Arc<Memory>,
}

impl fmt::Debug for CompiledGrammar {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("CompiledGrammar").finish_non_exhaustive()
    }
}

impl CompiledGrammar {
    pub(super) fn new(begin: TokenParser, eos: Arc<[u32]>, memory: Arc<Memory>) -> Self {
        Self { begin, eos, memory }
    }

    /// Returns an estimate of its size in memory, in bytes.
    pub(super) fn bytes(&self) -> usize {
        bytes(&self.begin, self.begin.parser_stats().all_items)
    }

    /// Starts a text. Texts share no parser, so that none can use up the limits of another.
    pub fn start(&self) -> GrammarMatcher {
        let mut share = Share::new(&self.memory);
        let items = self.begin.parser_stats().all_items;
        let parser = share.hold(self.bytes()).map(|()| self.begin.deep_clone()).map_err(OffGrammar);
        GrammarMatcher { parser, items, share, eos: Arc::clone(&self.eos), forced: Vec::new(), ended: false }
    }
}

/// The position of one text in its grammar.
pub struct GrammarMatcher {
    /// The parser, or the error that ended it.
    parser: Result<TokenParser, OffGrammar>,
    /// Items that the parser keeps for the accepted tokens.
    items: usize,
    share: Share,
    eos: Arc<[u32]>,
    /// The tokens that must come next, the last one first. They are kept because finding the next one means encoding
    /// all forced text.
    forced: Vec<u32>,
    /// Whether an end-of-text token was accepted.
    ended: bool,
}

impl fmt::Debug for GrammarMatcher {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("GrammarMatcher").field("complete", &self.is_complete()).finish_non_exhaustive()
    }
}

impl GrammarMatcher {
    /// Returns a bit mask of the tokens that may come next; token 0 is the lowest bit of the first word. It includes
    /// the end-of-text tokens if the text may end here.
    ///
    /// # Errors
    /// The grammar exceeds its limits.
    pub fn mask(&mut self) -> Result<Vec<u32>, OffGrammar> {
        if self.ended {
            return Ok(Vec::new());
        }
        if self.forced.is_empty() {
            self.find_forced()?;
        }
        let forced = self.forced();
        self.run(|parser| match (parser.stop_reason(), forced) {
            (StopReason::NotStopped, None) => parser.compute_mask().map(Vec::from),
            (StopReason::NotStopped, Some(token)) => {
                Ok(Vec::from(parser.token_env.tok_trie().singleton_token_set(token)))
            }
            _ => Ok(Vec::from(parser.token_env.tok_trie().eos_token_set())),
        })
    }

    /// Returns the token that must come next, if an earlier mask has shown it.
    pub fn forced(&self) -> Option<u32> {
        self.forced.last().copied()
    }

    fn find_forced(&mut self) -> Result<(), OffGrammar> {
        // The parser advances over forced bytes before their tokens are accepted.
        let items = self.items;
        let (forced, items) = self.run(|parser| {
            if parser.stop_reason() != StopReason::NotStopped {
                return Ok((Vec::new(), items));
            }
            let before = parser.parser_stats().all_items;
            let forced = parser.compute_ff_tokens();
            Ok((forced, items + parser.parser_stats().all_items.saturating_sub(before)))
        })?;
        self.forced = forced;
        self.forced.reverse();
        self.items = items;
        Ok(())
    }

    /// Advances by the sampled token.
    ///
    /// # Errors
    /// The token is not allowed here, or the grammar exceeds its limits.
    pub fn accept(&mut self, token: u32) -> Result<(), OffGrammar> {
        if self.ended {
            return Err(OffGrammar(format!("token {token} comes after the end of the text")));
        }
        if self.eos.contains(&token) {
            if !self.is_complete() && !self.run(|parser| Ok(parser.is_accepting()))? {
                return Err(OffGrammar(format!("token {token} ends the text too early")));
            }
            self.ended = true;
            return Ok(());
        }
        let items = self.run(|parser| {
            let before = parser.parser_stats().all_items;
            // Returns tokens to take back only where backtracking is enabled, which it is not.
            parser.consume_token(token)?;
            parser.check_stop()?;
            Ok(parser.parser_stats().all_items.saturating_sub(before))
        })?;
        self.items += items;
        if self.forced.pop().is_some_and(|forced| forced != token) {
            self.forced.clear();
        }
        Ok(())
    }

    /// Whether the text is complete and only its end can follow.
    pub fn is_complete(&self) -> bool {
        let ok = |parser: &TokenParser| parser.stop_reason() != StopReason::NotStopped && parser.stop_reason().is_ok();
        self.ended || self.parser.as_ref().is_ok_and(ok)
    }

    /// Runs `work`, and then accounts for the memory that the parser holds. An error ends the parser.
    fn run<T>(&mut self, work: impl FnOnce(&mut TokenParser) -> anyhow::Result<T>) -> Result<T, OffGrammar> {
        let parser = self.parser.as_mut().map_err(|error| error.clone())?;
        let done = catch_unwind(AssertUnwindSafe(|| work(parser))).map_err(|error| off(&error));
        let mut held = || self.share.hold(bytes(parser, self.items)).map_err(OffGrammar);
        let done = done.and_then(|done| held().map(|()| done));
        if let Err(error) = &done {
            self.parser = Err(error.clone());
            self.share.release();
        }
        done
    }
}

/// Returns an estimate of a parser's size in memory, in bytes: the tables of its lexer, which the library counts at
/// about half their real size, and what it keeps of the text.
fn bytes(parser: &TokenParser, items: usize) -> usize {
    let text = parser.parser_stats().definitive_bytes;
    2 * parser.parser.lexer_stats().num_bytes + items * ITEM_BYTES + text * BYTES_PER_BYTE
}

fn off(error: &anyhow::Error) -> OffGrammar {
    let reason: String = error.to_string().chars().take(500).collect();
    // The library reports its own panics as errors. Only this request fails, and the log informs the operator.
    if reason.starts_with("panic") {
        tracing::warn!("the grammar matcher panicked: {}", reason.escape_debug());
    }
    OffGrammar(reason)
}
