//! The benchmark's texts: code and a table, which are given, and prose, which the model generates.

use std::sync::Arc;

use anyhow::{Result, ensure};
use tidegate_model::SamplingParams;
use tidegate_model::sampling::TokenSet;
use tidegate_server::engine::{Constraint, ConstraintError, Grammar, RequestParameters};
use tidegate_server::text::Tokenizer;

/// A frozen copy of a source file, so that the results of different builds are about the same text.
const CODE: &str = include_str!("code.txt");

/// The prompt for prose.
const OPENING: &str = "Once upon a time";

/// A text to generate.
#[derive(Debug)]
pub(super) enum Text {
    /// The model must generate exactly these tokens; the first of them are the prompt.
    Given(Vec<u32>),
    /// The model continues a short prompt freely.
    Free { prompt: Vec<u32>, sampling: SamplingParams },
}

/// Returns the texts with their names. Each given text has `known` prompt tokens and then `tokens` measured ones. Prose
/// is included if `sampling` says how to sample it: only models that can generate any need it.
pub(super) fn texts(
    tokenizer: &Tokenizer,
    (known, tokens): (usize, usize),
    sampling: Option<&SamplingParams>,
) -> Result<Vec<(&'static str, Text)>> {
    let given = |text: &str| -> Result<Text> {
        let mut ids = tokenizer.encode(text)?;
        let (most, length) = (ids.len(), known + tokens);
        ensure!(most >= length, "--prompt and --steps: the given text has {most} tokens, {length} are wanted");
        ids.truncate(length);
        Ok(Text::Given(ids))
    };
    let mut texts = vec![("code", given(CODE)?), ("table", given(&table(known + tokens))?)];
    if let Some(sampling) = sampling {
        texts.push(("prose", Text::Free { prompt: tokenizer.encode(OPENING)?, sampling: sampling.clone() }));
    }
    Ok(texts)
}

/// Returns a table in which some columns repeat. Each row has more than one token.
fn table(rows: usize) -> String {
    let cities = ["Rome", "Oslo", "Lima", "Cairo", "Quito"];
    let row = |i: usize| {
        let (city, price) = (cities[i * i % cities.len()], i * 7919 % 1000);
        format!("| 2026-11-{:02} | order {} | {city} | paid in full | {price}.00 EUR |\n", 1 + i % 28, 1000 + i)
    };
    (0..rows).map(row).collect()
}

impl Text {
    /// Returns the request that generates the text. Each `seed` gives a different free text.
    pub(super) fn request(&self, (known, tokens): (usize, usize), seed: u64) -> RequestParameters {
        let mut parameters = RequestParameters { max_tokens: tokens, ..RequestParameters::default() };
        match self {
            Self::Given(text) => {
                let (prompt, rest) = text.split_at(known);
                parameters.prompt = prompt.to_vec();
                parameters.grammar = Some(Arc::new(Given { tokens: rest.into(), at: 0 }));
            }
            Self::Free { prompt, sampling } => {
                parameters.prompt.clone_from(prompt);
                parameters.ignore_eos = true;
                parameters.sampling = SamplingParams { seed, ..sampling.clone() };
            }
        }
        parameters
    }
}

/// A grammar that allows exactly one text, so that every model generates it, even with random weights. The sampler
/// still chooses each token.
#[derive(Clone, Debug)]
struct Given {
    tokens: Arc<[u32]>,
    at: usize,
}

impl Grammar for Given {
    fn start(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

impl Constraint for Given {
    fn mask(&mut self, allowed: &mut TokenSet) -> Result<(), ConstraintError> {
        allowed.clear();
        allowed.insert(self.tokens[self.at]);
        Ok(())
    }

    /// Forced tokens would take no decode steps.
    fn forced(&self) -> Option<u32> {
        None
    }

    fn accept(&mut self, _: u32) -> Result<(), ConstraintError> {
        self.at += 1;
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.at == self.tokens.len()
    }
}
