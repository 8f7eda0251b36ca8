//! Fields that a format defines and this server does not support. Ignoring one would answer a different question.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::api::error::ApiError;

/// A field, and the values besides null that ask for nothing.
pub(super) type Neutral = (&'static str, Vec<Value>);

/// Refuses the first of `fields` that has another value than null or its neutral ones.
pub(super) fn refuse(
    rest: &BTreeMap<String, Value>,
    fields: impl IntoIterator<Item = Neutral>,
) -> Result<(), ApiError> {
    for (name, neutral) in fields {
        let Some(value) = rest.get(name).filter(|value| !value.is_null()) else { continue };
        if !neutral.iter().any(|neutral| is_same(value, neutral)) {
            let message = if neutral.is_empty() {
                format!("{name} is not supported and must be absent or null")
            } else {
                let allowed: Vec<String> = neutral.iter().map(ToString::to_string).collect();
                format!("{name} must be absent, null or {}: nothing else is supported", allowed.join(" or "))
            };
            return Err(ApiError::invalid(Some(name), message));
        }
    }
    Ok(())
}

/// Refuses fields that have another name in this format: the name that the client sent, and the right one.
pub(super) fn refuse_other_names(
    rest: &BTreeMap<String, Value>,
    names: &[(&'static str, &'static str)],
) -> Result<(), ApiError> {
    match names.iter().find(|(name, _)| rest.get(*name).is_some_and(|value| !value.is_null())) {
        Some((name, here)) => Err(ApiError::invalid(Some(name), format!("{name} must be absent: it is {here} here"))),
        None => Ok(()),
    }
}

/// Whether two values are the same: 1 and 1.0 are one number.
fn is_same(value: &Value, other: &Value) -> bool {
    value == other || value.as_f64().is_some_and(|number| other.as_f64() == Some(number))
}
