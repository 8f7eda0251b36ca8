//! The prompt's text before the generated text (`echo`), and the positions of the prompt's tokens in it.

use crate::api::formats::openai::logprobs::{CompletionLogprobs, TokenNames};
use crate::api::request::ValidRequest;
use crate::engine::TokenLogprobs;
use crate::text::Tokenizer;

/// A prompt that is echoed.
#[derive(Clone, Debug)]
pub(super) struct Echo {
    pub(super) text: String,
    ids: Vec<u32>,
    /// Whether the request gave the prompt as text. If it gave token ids, special tokens have no text.
    given: bool,
}

impl Echo {
    /// Returns the echoes of a request's prompts. `given` has their texts, unless they came as token ids. If generated
    /// text follows, it completes a character that a prompt leaves incomplete, so the echo leaves that out.
    pub(super) fn all(given: Vec<String>, request: &ValidRequest) -> Vec<Self> {
        let (tokenizer, follows) = (&request.served.tokenizer, request.max_tokens > 0);
        let mut given = given.into_iter();
        let echo = |ids: &Vec<u32>| {
            let ids = ids.clone();
            match given.next() {
                Some(text) => Self { text, ids, given: true },
                None => Self { text: decoded(&ids, tokenizer, follows), ids, given: false },
            }
        };
        request.prompts.iter().map(echo).collect()
    }

    /// Returns the log probabilities of the prompt's tokens.
    pub(super) fn logprobs(
        &self,
        logprobs: &[Option<TokenLogprobs>],
        tokenizer: &Tokenizer,
        names: &TokenNames,
    ) -> CompletionLogprobs {
        let mut lists = CompletionLogprobs::new(names);
        // The length of the text before the token, in bytes and in characters.
        let (mut place, mut offset) = (0, 0);
        let mut detokenizer = tokenizer.vocabulary().detokenizer();
        for (token, logprobs) in self.ids.iter().zip(logprobs) {
            lists.push(*token, logprobs.clone(), offset);
            let mut characters = String::new();
            match tokenizer.special(*token).filter(|_| self.given) {
                // A given text contains special tokens by name, but not those that the tokenizer added around it.
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

fn decoded(ids: &[u32], tokenizer: &Tokenizer, follows: bool) -> String {
    let (mut detokenizer, mut text) = (tokenizer.vocabulary().detokenizer(), String::new());
    for id in ids {
        detokenizer.push(tokenizer.vocabulary().bytes(*id), &mut text);
    }
    if !follows {
        detokenizer.finish(&mut text);
    }
    text
}
