//! What ends a text by itself: the tokens that do, and from when on they may.

use super::event::{FinishReason, StopCause};
use super::request::{Limits, RequestError, RequestParameters};

/// How many tokens a request may name that end its text.
const MAX_STOP_TOKENS: usize = 64;

/// How a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// By this end-of-text token.
    Eos(u32),
    /// By this token, which the request has named.
    StopToken(u32),
    /// By a stop string.
    StopString,
    /// By its grammar, which allows nothing more.
    Grammar,
    /// By the number of tokens.
    Length,
    /// By the one who asked for it.
    Interrupted,
}

impl Ending {
    pub(super) fn reason(self) -> FinishReason {
        match self {
            Self::Eos(_) | Self::StopToken(_) | Self::StopString | Self::Grammar => FinishReason::Stop,
            Self::Length => FinishReason::Length,
            Self::Interrupted => FinishReason::Interrupted,
        }
    }

    /// What ended a text in which `found` was the stop string, where there was one.
    pub(super) fn cause(self, found: Option<&str>) -> Option<StopCause> {
        match self {
            Self::Eos(token) => Some(StopCause::Eos(token)),
            Self::StopToken(token) => Some(StopCause::Token(token)),
            Self::StopString => found.map(|found| StopCause::String(found.into())),
            Self::Grammar => Some(StopCause::Grammar),
            Self::Length | Self::Interrupted => None,
        }
    }
}

/// When one request's text may end by itself.
#[derive(Debug)]
pub(super) struct Ends {
    ignore_eos: bool,
    stop_token_ids: Vec<u32>,
    min_tokens: usize,
}

impl Ends {
    pub(super) fn new(parameters: &RequestParameters, limits: &Limits) -> Result<Self, RequestError> {
        let bound = |parameter, bound: String, found: String| RequestError::Bound { parameter, bound, found };
        let RequestParameters { ignore_eos, min_tokens, max_tokens, .. } = *parameters;
        let stop_token_ids = &parameters.stop_token_ids;
        if ignore_eos && parameters.grammar.is_some() {
            // Where the grammar ends, nothing but the end is allowed.
            return Err(bound("grammar", "absent where ignore_eos is set".into(), "both".into()));
        }
        if min_tokens > max_tokens {
            let allowed = format!("from 0 to max_tokens, which is {max_tokens}");
            return Err(bound("min_tokens", allowed, min_tokens.to_string()));
        }
        if stop_token_ids.len() > MAX_STOP_TOKENS {
            let allowed = format!("at most {MAX_STOP_TOKENS} token ids");
            return Err(bound("stop_token_ids", allowed, stop_token_ids.len().to_string()));
        }
        if let Some(id) = stop_token_ids.iter().find(|id| **id as usize >= limits.vocab_size) {
            let allowed = format!("made of token ids below {}", limits.vocab_size);
            return Err(bound("stop_token_ids", allowed, id.to_string()));
        }
        Ok(Self { ignore_eos, stop_token_ids: stop_token_ids.clone(), min_tokens })
    }

    /// Whether the text may end where it has `tokens` tokens, the last of which is looked at.
    pub(super) fn may_follow(&self, tokens: usize) -> bool {
        tokens > self.min_tokens
    }

    /// Whether `token` ends the text, wherever it stands.
    pub(super) fn by(&self, token: u32, eos: &[u32]) -> Option<Ending> {
        if !self.ignore_eos && eos.contains(&token) {
            Some(Ending::Eos(token))
        } else {
            self.stop_token_ids.contains(&token).then_some(Ending::StopToken(token))
        }
    }

    /// All tokens that end the text, of which `eos` are those that end every text.
    pub(super) fn tokens<'a>(&'a self, eos: &'a [u32]) -> impl Iterator<Item = u32> + use<'a> {
        let eos = if self.ignore_eos { &[] } else { eos };
        eos.iter().chain(&self.stop_token_ids).copied()
    }

    /// Makes every token that ends a text impossible, but where nothing else is possible: then the end it is.
    /// logits: (vocab).
    pub(super) fn forbid(&self, eos: &[u32], logits: &mut [f32]) {
        let ends = |token: u32| self.tokens(eos).any(|end| end == token);
        if !(0..).zip(&*logits).any(|(token, logit)| *logit > f32::NEG_INFINITY && !ends(token)) {
            return;
        }
        for id in self.tokens(eos) {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_is_forbidden_where_there_is_anything_else() {
        let limits = Limits { vocab_size: 4, max_prompt_tokens: 1, max_tokens: 9, sources: None };
        let parameters = RequestParameters { max_tokens: 9, stop_token_ids: vec![2], ..RequestParameters::default() };
        let ends = Ends::new(&parameters, &limits).unwrap();
        let after = |mut logits: [f32; 4]| {
            ends.forbid(&[3, 70], &mut logits);
            logits
        };
        let none = f32::NEG_INFINITY;
        assert_eq!(after([0.0, 1.0, 2.0, 3.0]), [0.0, 1.0, none, none]);
        assert_eq!(after([none, none, 2.0, 3.0]), [none, none, 2.0, 3.0]);
    }
}
