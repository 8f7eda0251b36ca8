//! A compiled grammar, and the position of one text in it.

use std::fmt;
use std::sync::Arc;

use llguidance::Matcher;

/// Why a text cannot continue in its grammar. The message is for the log.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct OffGrammar(String);

/// A grammar, shared by any number of texts.
pub struct CompiledGrammar {
    /// The matcher at the beginning of a text.
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

    /// Starts a text. Texts share nothing, so that none can use up the limits of another.
    pub fn start(&self) -> GrammarMatcher {
        GrammarMatcher { matcher: self.begin.deep_clone(), eos: Arc::clone(&self.eos), ended: false }
    }
}

/// The position of one text in its grammar.
pub struct GrammarMatcher {
    matcher: Matcher,
    eos: Arc<[u32]>,
    /// An end-of-text token was accepted.
    ended: bool,
}

impl fmt::Debug for GrammarMatcher {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("GrammarMatcher").field("complete", &self.is_complete()).finish_non_exhaustive()
    }
}

impl GrammarMatcher {
    /// A bit mask of the tokens that may come next, token 0 being the lowest bit of the first word. It includes the
    /// end-of-text tokens if the text may end here.
    ///
    /// # Errors
    /// The grammar exceeds its limits.
    pub fn mask(&mut self) -> Result<Vec<u32>, OffGrammar> {
        if self.ended {
            return Ok(Vec::new());
        }
        self.matcher.compute_mask_or_eos().map(Vec::from).map_err(off)
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
            if !self.is_complete() && !self.matcher.is_accepting().map_err(off)? {
                return Err(OffGrammar(format!("token {token} ends the text too early")));
            }
            self.ended = true;
            return Ok(());
        }
        self.matcher.consume_token(token).map_err(off)
    }

    /// Whether the text is complete and only its end can follow.
    pub fn is_complete(&self) -> bool {
        self.ended || (self.matcher.is_stopped() && self.matcher.stop_reason().is_ok())
    }
}

fn off(error: impl fmt::Display) -> OffGrammar {
    let reason: String = error.to_string().chars().take(500).collect();
    // The library reports its own panics as errors. Only this request fails, and the log tells the operator.
    if reason.starts_with("panic") {
        tracing::warn!("the grammar matcher panicked: {}", reason.escape_debug());
    }
    OffGrammar(reason)
}
