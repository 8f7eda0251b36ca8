//! Logit biases as llama.cpp takes them: pairs of a token id or a text and its bias, or an object with these as keys.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::api::error::ApiError;
use crate::api::openapi::schemas::json_schemas;
use crate::api::request::encode::encode;
use crate::api::state::Served;
use crate::text::Around;

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

json_schemas! {
    Biases: "LlamaBiases" = {
        "description": "Values added to the logits: pairs of a token id or a text and a number, or an object of them; \
                        `false` bans the token.",
        "oneOf": [
            {"type": "array", "items": {"type": "array", "minItems": 2, "maxItems": 2, "prefixItems": [
                {"oneOf": [{"type": "string"}, {"type": "integer", "minimum": 0, "maximum": "token_id"}]},
                {"oneOf": [{"const": false}, {"type": "number", "minimum": NEVER, "maximum": -NEVER}]},
            ]}},
            {"type": "object", "additionalProperties":
                {"oneOf": [{"const": false}, {"type": "number", "minimum": NEVER, "maximum": -NEVER}]}},
        ],
    };
}

impl Biases {
    /// Returns the bias of each token. If a token has several, the last one counts.
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
                Target::Text(text) => encode(&text, Around::More, "logit_bias", served)?,
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
                let bias = match bias {
                    Bias::Added(bias) => bias,
                    Bias::Never(false) => NEVER,
                    Bias::Never(true) => {
                        return Err(invalid("logit_bias must have numbers or false as biases, found true".into()));
                    }
                };
                biases.insert(id, bias);
            }
        }
        Ok(biases)
    }
}

/// Reads a key: a number is a token id, anything else a text.
fn target(key: String) -> Target {
    key.parse().map_or(Target::Text(key), Target::Id)
}
