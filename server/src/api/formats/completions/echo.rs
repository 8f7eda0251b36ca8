//! A prompt's own text in front of what is made of it, and where its tokens stand in that.

use crate::api::formats::openai::logprobs::{CompletionLogprobs, TokenNames};
use crate::api::formats::openai::wire::Prompt;
use crate::engine::TokenLogprobs;
use crate::text::{Detokenizer, Tokenizer};

/// A prompt that is told with its text.
#[derive(Clone, Debug)]
pub(in crate::api) struct Echo {
    pub(in crate::api) text: String,
    ids: Vec<u32>,
    /// Whether the text is the request's own; where only ids have come, special tokens have no text.
    given: bool,
}

impl Echo {
    /// The echoes of `prompt`, whose token ids are `ids`. Where a text follows, a character that a prompt has begun
    /// is left to it.
    pub(in crate::api) fn all(
        prompt: Option<&Prompt>,
        ids: &[Vec<u32>],
        tokenizer: &Tokenizer,
        follows: bool,
    ) -> Vec<Self> {
        let given = match prompt {
            Some(Prompt::Text(text)) => vec![text.clone()],
            Some(Prompt::Texts(texts)) => texts.clone(),
            Some(Prompt::Ids(_) | Prompt::IdLists(_)) | None => Vec::new(),
        };
        let mut given = given.into_iter();
        let echo = |ids: &Vec<u32>| {
            let ids = ids.clone();
            match given.next() {
                Some(text) => Self { text, ids, given: true },
                None => Self { text: decoded(&ids, tokenizer, follows), ids, given: false },
            }
        };
        ids.iter().map(echo).collect()
    }

    /// The log probabilities of the prompt's tokens.
    pub(in crate::api) fn logprobs(
        &self,
        logprobs: &[Option<TokenLogprobs>],
        tokenizer: &Tokenizer,
        names: &TokenNames,
    ) -> CompletionLogprobs {
        let mut lists = CompletionLogprobs::default();
        // Bytes of the text that are before the token, and characters that are.
        let (mut place, mut offset) = (0, 0);
        let mut detokenizer = Detokenizer::new();
        for (token, logprobs) in self.ids.iter().zip(logprobs) {
            lists.push(*token, logprobs.as_ref(), offset, names);
            let mut characters = String::new();
            match tokenizer.special(*token).filter(|_| self.given) {
                // In a text that was given, a special token stands as its name; those around the text do not.
                Some(name) if self.text.get(place..).is_some_and(|rest| rest.starts_with(name)) => {
                    characters.push_str(name);
                }
                _ => detokenizer.push(tokenizer.vocabulary().bytes(*token), &mut characters),
            }
            place += characters.len();
            offset += characters.chars().count();
        }
        lists
    }
}

/// The text of `ids`.
fn decoded(ids: &[u32], tokenizer: &Tokenizer, follows: bool) -> String {
    let (mut detokenizer, mut text) = (Detokenizer::new(), String::new());
    for id in ids {
        detokenizer.push(tokenizer.vocabulary().bytes(*id), &mut text);
    }
    if !follows {
        detokenizer.finish(&mut text);
    }
    text
}
