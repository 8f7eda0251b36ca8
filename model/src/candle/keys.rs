//! The keys of a third-party `config.json`, and checks against the values that candle's models hard-code.

use std::fmt::Debug;
use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::config::{ConfigError, within};

/// The keys of a config. Keys that no method reads do not affect results, or are unknown.
pub(super) struct Keys<'a>(pub(super) &'a Map<String, Value>);

impl Keys<'_> {
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key)
    }

    /// Returns a count from 1 to `most`.
    pub(super) fn number(&self, key: &'static str, most: usize) -> Result<usize, ConfigError> {
        let found = self.get(key).unwrap_or(&Value::Null);
        let number = found.as_u64().and_then(|number| usize::try_from(number).ok());
        let number = number.ok_or_else(|| ConfigError::bound(key, format!("between 1 and {most}"), found))?;
        within(key, number, 1, most)?;
        Ok(number)
    }

    /// Like [`Self::number`], but returns `default` if the key is absent or null.
    pub(super) fn number_or(&self, key: &'static str, default: usize, most: usize) -> Result<usize, ConfigError> {
        if self.get(key).is_none_or(Value::is_null) { Ok(default) } else { self.number(key, most) }
    }

    /// Returns a number in `range`, or `default` if the key is absent.
    pub(super) fn float_or(
        &self,
        key: &'static str,
        default: f64,
        range: RangeInclusive<f64>,
    ) -> Result<f64, ConfigError> {
        let Some(found) = self.get(key) else { return Ok(default) };
        let number = found.as_f64().ok_or_else(|| ConfigError::bound(key, "a number", found))?;
        within(key, number, *range.start(), *range.end())?;
        Ok(number)
    }

    /// Rejects every value except `value`. The key may be absent or null.
    pub(super) fn only(&self, key: &'static str, value: &Value) -> Result<(), ConfigError> {
        let same = |found: &Value| found == value || found.is_number() && found.as_f64() == value.as_f64();
        match self.get(key) {
            Some(found) if !found.is_null() && !same(found) => {
                Err(ConfigError::bound(key, format!("{value} for the candle backend"), found))
            }
            _ => Ok(()),
        }
    }
}

/// Rejects every value of a field except `only`.
pub(super) fn fixed<T: Copy + PartialEq + Debug>(field: &'static str, found: T, only: T) -> Result<(), ConfigError> {
    if found == only {
        return Ok(());
    }
    Err(ConfigError::bound(field, format!("{only:?} for the candle backend"), format!("{found:?}")))
}
