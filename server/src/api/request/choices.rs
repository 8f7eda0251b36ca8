//! The number of texts that a request gets (`n`, `best_of`), and the limit on the tokens of all of them together.

use super::continuation::Keep;
use super::names::ParameterNames;
use crate::api::error::ApiError;
use crate::api::state::Served;

/// Most texts for one prompt.
const MAX_CHOICES: usize = 128;

/// Tokens that any request may take, even if a single text has a lower limit. The tokens of its prompts and texts
/// count, and each counts once more for every log probability listed with it.
const MIN_REQUEST_TOKENS: u64 = 1 << 21;

/// Bytes of states that one response may hold until its last text has ended, besides the state of one text.
const MAX_STATE_BYTES: u64 = 64 << 20;

/// The number of texts for each prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::api) struct Choices {
    /// Texts in the response.
    pub(in crate::api) returned: usize,
    /// Texts that are generated; if more than `returned`, the likeliest are returned.
    pub(in crate::api) generated: usize,
}

/// One text for each prompt.
impl Default for Choices {
    fn default() -> Self {
        Self { returned: 1, generated: 1 }
    }
}

impl Choices {
    /// Checks `n` and `best_of`.
    pub(in crate::api) fn new(n: Option<u64>, best_of: Option<u64>, stream: bool) -> Result<Self, ApiError> {
        let bounded = |name, count: u64| match usize::try_from(count) {
            Ok(count) if (1..=MAX_CHOICES).contains(&count) => Ok(count),
            _ => Err(ApiError::invalid(Some(name), format!("{name} must be from 1 to {MAX_CHOICES}, found {count}"))),
        };
        let returned = bounded("n", n.unwrap_or(1))?;
        let generated = best_of.map_or(Ok(returned), |best_of| bounded("best_of", best_of))?;
        let refused = |message: String| Err(ApiError::invalid(Some("best_of"), message));
        if generated < returned {
            return refused(format!("best_of must be at least n, which is {returned}, found {generated}"));
        }
        let choices = Self { returned, generated };
        if choices.are_ranked() && stream {
            return refused(
                "best_of must be absent or equal to n if stream is true: the best are known at the end".into(),
            );
        }
        Ok(choices)
    }

    /// Whether more are generated than returned.
    pub(in crate::api) fn are_ranked(self) -> bool {
        self.generated > self.returned
    }

    /// Returns the parameter that asks for more than one text.
    pub(super) fn name(self) -> &'static str {
        if self.are_ranked() { "best_of" } else { "n" }
    }

    /// Refuses several texts for one conversation, unless the request says which of them are kept.
    pub(super) fn check_conversation(self, keep: Option<Keep>) -> Result<(), ApiError> {
        let name = self.name();
        let message = if self.generated == 1 {
            return Ok(());
        } else if keep.is_none() {
            format!(
                "{name} must be 1 with a conversation, which has one next text; in a session, keep (best, all or none) says \
                 which of n texts stay"
            )
        } else if self.are_ranked() {
            "best_of must be absent or equal to n with keep: all texts are returned".to_owned()
        } else {
            return Ok(());
        };
        Err(ApiError::invalid(Some(name), message))
    }

    /// Returns the bytes of the states that are held until the last text has ended. Refuses more than one response may
    /// hold.
    pub(super) fn held_states(self, keep: Option<Keep>, streamed: bool, served: &Served) -> Result<u64, ApiError> {
        let (asked, until) = match keep {
            Some(Keep::All) => ("keep: all", "until the last one ends"),
            // A text that ends replaces the best one or is dropped, but a stream handles its end only once the client
            // has read what came before. Meanwhile the slots go to the next texts.
            Some(Keep::Best) if streamed => ("keep: best and stream: true", "until the client has read them"),
            // Without a stream this happens at once, so the number of states is limited by the engine's slots.
            Some(Keep::Best | Keep::Nothing) | None => return Ok(0),
        };
        let others = self.generated as u64 - 1;
        let most = MAX_STATE_BYTES / served.state_bytes.max(1);
        if others <= most {
            return Ok(others * served.state_bytes);
        }
        let message = format!(
            "n must be at most {} with {asked}, found {}: the states of the texts are held {until}, and may have {} MiB \
             besides one",
            most + 1,
            self.generated,
            MAX_STATE_BYTES >> 20
        );
        Err(ApiError::invalid(Some("n"), message))
    }

    /// Refuses more texts than the queue can hold, and more tokens than one request may take. `listed` log
    /// probabilities come with each token of a text, and with each token of the prompt if it is `echoed`.
    pub(super) fn check_size(
        self,
        prompts: &[Vec<u32>],
        max_tokens: usize,
        (listed, echoed): (usize, bool),
        names: &ParameterNames,
        served: &Served,
    ) -> Result<(), ApiError> {
        let texts = prompts.len() * self.generated;
        // More than the queue holds would never be admitted.
        let most = served.engine.queue_capacity();
        if texts > most {
            let (name, prompts) = (self.name(), prompts.len());
            let message =
                format!("{name} must ask for at most {most} texts in all, found {texts} for {prompts} prompts");
            return Err(ApiError::invalid(Some(name), message));
        }
        let count = |number: usize| number as u64;
        let most = request_tokens(served);
        let prompt_tokens: u64 = prompts.iter().map(|ids| count(ids.len())).sum();
        let text_tokens = count(max_tokens).saturating_mul(count(prompts.len()));
        let scored = text_tokens + if echoed { prompt_tokens } else { 0 };
        let each = (prompt_tokens + text_tokens).saturating_add(scored.saturating_mul(count(listed)));
        let all = each.saturating_mul(count(self.generated));
        if all > most {
            let name = names.max_tokens;
            let message = format!(
                "{name} must be such that all texts, their prompts and log probabilities take at most {most} tokens \
                 together, found {all}"
            );
            return Err(ApiError::invalid(Some(name), message));
        }
        Ok(())
    }
}

/// Returns the most tokens that one request may take.
fn request_tokens(served: &Served) -> u64 {
    let limits = &served.limits;
    MIN_REQUEST_TOKENS.max((limits.longest_prompt() as u64).saturating_add(limits.max_tokens as u64))
}

/// Returns the most tokens that one text for each of `prompts` may have, with `listed` log probabilities per token.
pub(super) fn longest_text(prompts: &[Vec<u32>], listed: usize, served: &Served) -> usize {
    let prompt_tokens = prompts.iter().map(|ids| ids.len() as u64).sum();
    let each = (prompts.len() as u64).max(1).saturating_mul((listed as u64).saturating_add(1));
    let most = request_tokens(served).saturating_sub(prompt_tokens) / each;
    usize::try_from(most).unwrap_or(usize::MAX).clamp(1, served.limits.max_tokens)
}
