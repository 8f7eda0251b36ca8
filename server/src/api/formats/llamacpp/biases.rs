//! Logit biases as llama.cpp takes them: pairs of a token or a text and its bias, or an object of them.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::api::error::ApiError;
use crate::api::state::Served;

/// The lowest bias, which stands for "never".
const NEVER: f64 = -100.0;

/// Biases in either form.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected an array of pairs [token id or text, number or false], or an object of those")]
pub(super) enum Biases {
    Pairs(Vec<(Target, Bias)>),
    Object(BTreeMap<String, Bias>),
}

/// The token, or tokens, to bias.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Target {
    Id(u32),
    /// Every token of this text.
    Text(String),
}

/// A bias.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Bias {
    Added(f64),
    /// `false` means never.
    Never(bool),
}

impl Biases {
    /// The bias of each token. Several biases for one token are added up.
    pub(super) fn by_id(self, served: &Served) -> Result<BTreeMap<u32, f64>, ApiError> {
        let pairs = match self {
            Self::Pairs(pairs) => pairs,
            Self::Object(object) => object.into_iter().map(|(key, bias)| (target(key), bias)).collect(),
        };
        let invalid = |message: String| ApiError::invalid(Some("logit_bias"), message);
        let mut biases = BTreeMap::new();
        for (target, bias) in pairs {
            let ids = match target {
                Target::Id(id) => vec![id],
                Target::Text(text) => {
                    let ids = served.tokenizer.encode_more(&text);
                    ids.map_err(|error| invalid(format!("logit_bias: {error}")))?
                }
            };
            if let Bias::Added(bias) = bias
                && !(NEVER..=-NEVER).contains(&bias)
            {
                return Err(invalid(format!(
                    "logit_bias must have biases between {NEVER} and {}, found {bias}",
                    -NEVER
                )));
            }
            for id in ids {
                let sum: &mut f64 = biases.entry(id).or_default();
                match bias {
                    Bias::Added(bias) => *sum += bias,
                    Bias::Never(false) => *sum = NEVER,
                    Bias::Never(true) => {
                        return Err(invalid("logit_bias must have numbers or false as biases, found true".into()));
                    }
                }
            }
        }
        Ok(biases)
    }
}

/// A key that is a number is a token id.
fn target(key: String) -> Target {
    key.parse().map_or(Target::Text(key), Target::Id)
}
