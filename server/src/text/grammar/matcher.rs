//! A compiled grammar, and how far one text has come in it.

use std::fmt;
use std::sync::Arc;

use llguidance::Matcher;

/// Why a text cannot follow its grammar any further; its words are for the log.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct OffGrammar(String);

/// A grammar for any number of texts.
pub struct CompiledGrammar {
    /// At the beginning of a text.
    begin: Matcher,
    eos: Arc<[u32]>,
}

impl fmt::Debug for CompiledGrammar {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("CompiledGrammar").finish_non_exhaustive()
    }
}

impl CompiledGrammar {
    pub(super) fn new(begin: Matcher, eos: Arc<[u32]>) -> Self {
        Self { begin, eos }
    }

    /// The beginning of one text. It shares nothing with others, so that none can use up what another is allowed.
    pub fn start(&self) -> GrammarMatcher {
        GrammarMatcher { matcher: self.begin.deep_clone(), eos: Arc::clone(&self.eos), ended: false }
    }
}

/// How far one text has come in its grammar.
pub struct GrammarMatcher {
    matcher: Matcher,
    eos: Arc<[u32]>,
    /// An end-of-text token has been taken.
    ended: bool,
}

impl fmt::Debug for GrammarMatcher {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("GrammarMatcher").field("complete", &self.is_complete()).finish_non_exhaustive()
    }
}

impl GrammarMatcher {
    /// The tokens that may come next as bits, token 0 the lowest of the first word: those whose bytes go on with the
    /// grammar, and the end-of-text tokens where the text may end.
    ///
    /// # Errors
    /// The grammar is more than its limits allow.
    pub fn mask(&mut self) -> Result<Vec<u32>, OffGrammar> {
        if self.ended {
            return Ok(Vec::new());
        }
        self.matcher.compute_mask_or_eos().map(Vec::from).map_err(off)
    }

    /// Takes the token that was chosen.
    ///
    /// # Errors
    /// The token is not allowed here, or the grammar is more than its limits allow.
    pub fn accept(&mut self, token: u32) -> Result<(), OffGrammar> {
        if self.ended {
            return Err(OffGrammar(format!("token {token} comes after the end")));
        }
        if self.eos.contains(&token) {
            if !self.is_complete() && !self.matcher.is_accepting().map_err(off)? {
                return Err(OffGrammar(format!("token {token} ends the text where it is not whole")));
            }
            self.ended = true;
            return Ok(());
        }
        self.matcher.consume_token(token).map_err(off)
    }

    /// Whether the text is whole and nothing but its end can follow.
    pub fn is_complete(&self) -> bool {
        self.ended || (self.matcher.is_stopped() && self.matcher.stop_reason().is_ok())
    }
}

fn off(error: impl fmt::Display) -> OffGrammar {
    let reason: String = error.to_string().chars().take(500).collect();
    // The library gives its own panics as errors. The request ends as with any other, and its operator is told.
    if reason.starts_with("panic") {
        tracing::warn!("the matcher of grammars has panicked: {}", reason.escape_debug());
    }
    OffGrammar(reason)
}
