//! How many texts a request gets: `n`, `best_of`, and the bounds on all of them together.

use crate::api::error::ApiError;
use crate::api::formats::openai::wire::{Format, GenerationRequest};
use crate::api::state::Served;

/// Most texts for one prompt.
const MOST: usize = 128;

/// Tokens that one request may take at least, whatever the bounds on a single text: those of its prompts and texts,
/// each with the log probabilities that are listed with it.
const ROOM: u64 = 1 << 21;

/// The texts for each prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::api) struct Choices {
    /// Those that are told.
    pub(in crate::api) told: usize,
    /// Those that are generated; of more than are told, the likeliest are.
    pub(in crate::api) generated: usize,
}

impl Choices {
    /// What `wire` asks for.
    pub(in crate::api) fn read(format: Format, wire: &GenerationRequest) -> Result<Self, ApiError> {
        let bounded = |name, value: Option<u64>| match value.map(usize::try_from) {
            None => Ok(None),
            Some(Ok(count)) if (1..=MOST).contains(&count) => Ok(Some(count)),
            Some(_) => {
                let found = value.unwrap_or_default();
                Err(ApiError::invalid(Some(name), format!("{name} must be from 1 to {MOST}, found {found}")))
            }
        };
        let told = bounded("n", wire.n)?.unwrap_or(1);
        let best_of = bounded("best_of", wire.best_of)?;
        if format != Format::Completions && best_of.is_some_and(|best_of| best_of > 1) {
            let message = format!("best_of must be absent, null or 1 at {}", format.path());
            return Err(ApiError::invalid(Some("best_of"), message));
        }
        let generated = match best_of {
            // In chat it asks for nothing, whatever n is.
            Some(best_of) if format == Format::Completions => best_of,
            _ => told,
        };
        if generated < told {
            let message = format!("best_of must be at least n, which is {told}, found {generated}");
            return Err(ApiError::invalid(Some("best_of"), message));
        }
        let choices = Self { told, generated };
        if choices.are_ranked() && wire.stream.unwrap_or(false) {
            let message = "best_of must be absent or equal to n where stream is true: the best is known at the end";
            return Err(ApiError::invalid(Some("best_of"), message));
        }
        Ok(choices)
    }

    /// Whether more are generated than are told.
    pub(in crate::api) fn are_ranked(self) -> bool {
        self.generated > self.told
    }

    /// The parameter that asks for more than one text.
    fn name(self) -> &'static str {
        if self.are_ranked() { "best_of" } else { "n" }
    }

    /// Refuses more than one text where they would belong to one conversation.
    pub(in crate::api) fn check_single(self, what: &str) -> Result<(), ApiError> {
        if self.generated == 1 {
            return Ok(());
        }
        let name = self.name();
        let message =
            format!("{name} must be 1 with {what}: one text is the conversation's next; fork it to try several");
        Err(ApiError::invalid(Some(name), message))
    }

    /// Refuses more texts than can wait at once, and more tokens than one request may take: `listed` log
    /// probabilities with each token of a text, and with each of the prompt's where that is `echoed`.
    pub(in crate::api) fn check_room(self, sizes: &Sizes<'_>, served: &Served) -> Result<(), ApiError> {
        let texts = sizes.prompts.len() * self.generated;
        // More than can wait at once would never be let in.
        let most = served.engine.queue_capacity();
        if texts > most {
            let (name, prompts) = (self.name(), sizes.prompts.len());
            let message = format!(
                "{name} must be such that it asks for at most {most} texts, found {texts} for {prompts} prompts"
            );
            return Err(ApiError::invalid(Some(name), message));
        }
        let count = |number: usize| number as u64;
        let most = room(served);
        let read: u64 = sizes.prompts.iter().map(|ids| count(ids.len())).sum();
        let written = count(sizes.max_tokens).saturating_mul(count(sizes.prompts.len()));
        let told = written + if sizes.echoed { read } else { 0 };
        let each = (read + written).saturating_add(told.saturating_mul(count(sizes.listed)));
        let all = each.saturating_mul(count(self.generated));
        if all > most {
            let message = format!(
                "max_tokens must be such that all texts, their prompts and log probabilities take at most {most} \
                 tokens together, found {all}"
            );
            return Err(ApiError::invalid(Some("max_tokens"), message));
        }
        Ok(())
    }
}

/// Tokens that one request may take.
fn room(served: &Served) -> u64 {
    let limits = &served.limits;
    ROOM.max((limits.longest_prompt() as u64).saturating_add(limits.max_tokens as u64))
}

/// The most tokens that each text may have where nobody names a number, one text for each of `prompts`, with `listed`
/// log probabilities beside each token's own.
pub(in crate::api) fn longest(prompts: &[Vec<u32>], listed: u64, served: &Served) -> u64 {
    let read = prompts.iter().map(|ids| ids.len() as u64).sum();
    let each = (prompts.len() as u64).max(1).saturating_mul(listed.saturating_add(1));
    (room(served).saturating_sub(read) / each).clamp(1, served.limits.max_tokens as u64)
}

/// What a request takes.
pub(in crate::api) struct Sizes<'a> {
    pub(in crate::api) prompts: &'a [Vec<u32>],
    pub(in crate::api) max_tokens: usize,
    /// Log probabilities that are listed with each token, beside its own.
    pub(in crate::api) listed: usize,
    /// Whether the prompt's tokens are among those.
    pub(in crate::api) echoed: bool,
}
