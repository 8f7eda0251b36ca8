//! The lines of JSON that `measure` and `run.sh` write, and how their numbers are shown.

use std::path::Path;

use serde_json::Value;

use super::Result;

/// The lines of a measurement.
pub(super) struct Lines(pub(super) Vec<Value>);

impl Lines {
    pub(super) fn read(file: &Path) -> Result<Self> {
        let bytes = std::fs::read(file).map_err(|error| format!("{}: {error}", file.display()))?;
        // run.sh cuts its notes at a number of bytes.
        let text = String::from_utf8_lossy(&bytes);
        // A process that was killed may have left an incomplete line.
        Ok(Self(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()))
    }

    /// The lines about `what`.
    pub(super) fn of<'a>(&'a self, what: &'a str) -> impl Iterator<Item = &'a Value> {
        self.0.iter().filter(move |line| line["what"] == what)
    }

    /// The first line about `what` with these fields.
    pub(super) fn one(&self, what: &str, fields: &[(&str, Value)]) -> Option<&Value> {
        self.0.iter().find(|line| line["what"] == what && fields.iter().all(|(name, value)| line[*name] == *value))
    }
}

pub(super) fn number(line: &Value, field: &str) -> f64 {
    line[field].as_f64().unwrap_or(f64::NAN)
}

pub(super) fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// A number with three significant digits.
pub(super) fn digits(v: f64) -> String {
    let places = if v.is_finite() && v != 0.0 { (2.0 - v.abs().log10().floor()).clamp(0.0, 6.0) as usize } else { 0 };
    format!("{v:.places$}")
}

pub(super) fn with_ends(median: f64, least: f64, most: f64) -> String {
    format!("{} ({} to {})", digits(median), digits(least), digits(most))
}
