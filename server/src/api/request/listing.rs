//! The memory that the log probabilities of a response take, and the most that one request may ask for.
//!
//! A response in one piece is held until it is written: the log probabilities in compact form, and at the end its text.
//! A stream holds only the log probabilities of its prompts, which it sends at once.

use super::choices::Choices;
use super::names::ParameterNames;
use crate::api::error::ApiError;
use crate::api::memory::MAX_BYTES;

/// Bytes that a listed log probability takes on average: 8 while the response is generated, and the rest for its JSON.
/// The JSON takes about 65 bytes, and 4 or 5 for each byte of the token, so a token with more than 12 bytes takes more.
const BYTES_EACH: u64 = 128;

/// The divisor of [`MAX_BYTES`] for the texts of a request that asks for the greatest length: it would otherwise
/// reserve memory that it most likely does not need.
pub(super) const DEFAULT_PART: u64 = 16;

/// The log probabilities that a response holds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Listing {
    /// Log probabilities listed with each token, its own included; 0 if they are not asked for.
    each: u64,
    /// Echoed tokens of all texts' prompts.
    echoed: u64,
    /// Texts that are held until all have ended; 0 in a stream.
    held_texts: u64,
}

impl Listing {
    /// Describes the log probabilities of a request for these texts. `echoes` says whether each text begins with its
    /// prompt, and `collected` whether the response is held until its end.
    pub(super) fn new(
        listed: Option<usize>,
        (prompts, choices): (&[Vec<u32>], Choices),
        echoes: bool,
        collected: bool,
    ) -> Self {
        let Some(listed) = listed else { return Self::default() };
        let generated = choices.generated as u64;
        let prompt_tokens: u64 = prompts.iter().map(|ids| ids.len() as u64).sum();
        Self {
            each: listed as u64 + 1,
            echoed: if echoes { prompt_tokens.saturating_mul(generated) } else { 0 },
            held_texts: if collected { (prompts.len() as u64).saturating_mul(generated) } else { 0 },
        }
    }

    /// Returns the longest text that fits in `bytes` besides the echoed prompts; `None` if the length does not matter.
    fn longest(&self, bytes: u64) -> Option<u64> {
        let tokens = bytes / BYTES_EACH.saturating_mul(self.each).max(1);
        tokens.saturating_sub(self.echoed).checked_div(self.held_texts).filter(|_| self.each > 0)
    }

    /// Returns the most tokens of a text whose request sets no limit, if its generated texts may take 1/`part` of the
    /// memory; `None` if memory sets no limit.
    pub(super) fn default_tokens(&self, part: u64) -> Option<usize> {
        let modest = Self { echoed: 0, ..*self }.longest(MAX_BYTES / part)?;
        Some(usize::try_from(modest.min(self.longest(MAX_BYTES)?)).unwrap_or(usize::MAX).max(1))
    }

    /// Returns the bytes to reserve for texts of up to `max_tokens`. Refuses more than one response may hold.
    pub(super) fn bytes(&self, max_tokens: usize, names: &ParameterNames) -> Result<u64, ApiError> {
        let of_tokens = |tokens: u64| tokens.saturating_mul(self.each).saturating_mul(BYTES_EACH);
        let bytes = of_tokens(self.echoed.saturating_add(self.held_texts.saturating_mul(max_tokens as u64)));
        if bytes <= MAX_BYTES {
            return Ok(bytes);
        }
        let (each, most) = (self.each, MAX_BYTES / BYTES_EACH / self.each.max(1));
        let limit = format!(
            "where each token has {each} log probabilities: a response may hold {} MiB of them, at {BYTES_EACH} bytes \
             each",
            MAX_BYTES >> 20
        );
        let longest = self.longest(MAX_BYTES).filter(|_| of_tokens(self.echoed) < MAX_BYTES);
        let (name, message) = if let Some(longest) = longest {
            let name = names.max_tokens;
            (name, format!("{name} must be at most {longest}, found {max_tokens}, {limit}; a stream holds none"))
        } else {
            let (name, echoed) = (names.prompt, self.echoed);
            (name, format!("{name} must have at most {most} tokens in all echoed texts, found {echoed}, {limit}"))
        };
        Err(ApiError::invalid(Some(name), message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: ParameterNames = ParameterNames::openai("prompt", "max_tokens");

    fn listing(listed: usize, generated: usize, echoes: bool, collected: bool) -> Listing {
        let choices = Choices { returned: generated, generated };
        Listing::new(Some(listed), (&[vec![1; 100], vec![2; 50]], choices), echoes, collected)
    }

    #[test]
    fn all_listed_tokens_of_all_texts_count() {
        let bytes = |listing: Listing| listing.bytes(10, &NAMES).unwrap();
        assert_eq!(bytes(listing(4, 1, false, true)), 2 * 10 * 5 * 128);
        assert_eq!(bytes(listing(4, 3, false, true)), 3 * 2 * 10 * 5 * 128);
        assert_eq!(bytes(listing(4, 3, true, true)), 3 * (150 + 2 * 10) * 5 * 128);
        assert_eq!(bytes(listing(4, 3, true, false)), 3 * 150 * 5 * 128, "a stream holds its prompts alone");
        assert_eq!(bytes(listing(0, 1, false, false)), 0);
        let none = Listing::new(None, (&[vec![1; 100]], Choices::default()), true, true);
        assert_eq!((none.bytes(usize::MAX, &NAMES).unwrap(), none.default_tokens(1)), (0, None));
    }

    #[test]
    fn the_limit_is_exact_and_named() {
        let longest = (64 << 20) / 128 / 21 / 2;
        let twenty = listing(20, 1, false, true);
        assert!(twenty.bytes(longest, &NAMES).is_ok());
        let refused = twenty.bytes(longest + 1, &NAMES).unwrap_err();
        assert_eq!(refused.param(), Some("max_tokens"));
        let start = format!("max_tokens must be at most {longest}, found {}, where each token has 21", longest + 1);
        assert!(refused.message().starts_with(&start) && refused.message().contains("64 MiB"), "{}", refused.message());
        assert!(listing(20, 1, false, false).bytes(usize::MAX, &NAMES).is_ok());
        assert!(twenty.bytes(usize::MAX, &NAMES).is_err());

        // 150 tokens of prompts in each of 128 texts.
        let echoed = Listing { held_texts: 0, ..listing(20, 128, true, false) };
        assert!(echoed.bytes(0, &NAMES).is_ok());
        let refused = Listing { echoed: 24_967, ..echoed }.bytes(0, &NAMES).unwrap_err();
        assert_eq!(refused.param(), Some("prompt"));
        assert!(refused.message().contains("at most 24966 tokens") && refused.message().contains("found 24967"));
    }

    #[test]
    fn texts_of_the_greatest_length_get_a_part_of_the_limit() {
        assert_eq!(listing(20, 1, false, true).default_tokens(DEFAULT_PART), Some((4 << 20) / 128 / 21 / 2));
        assert_eq!(listing(20, 1, false, false).default_tokens(DEFAULT_PART), None);
        // Texts of the default length may use the whole limit.
        assert_eq!(listing(20, 8, false, true).default_tokens(1), Some((64 << 20) / 128 / 21 / 16));
        // Echoed prompts leave less.
        let echoed = Listing { echoed: 24_966 - 10, ..listing(20, 1, true, true) };
        assert_eq!(echoed.default_tokens(DEFAULT_PART), Some(5));
    }
}
