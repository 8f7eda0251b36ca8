//! Parsers for the values of flags.

pub(super) const DEFAULT_PORT: u16 = 8080;

pub(super) fn port(text: &str) -> Result<u16, String> {
    // Kubernetes sets TIDEGATE_PORT=tcp://ADDRESS:PORT in pods that run beside a service named tidegate.
    if text.starts_with("tcp://") {
        return Ok(DEFAULT_PORT);
    }
    text.parse().map_err(|_| "must be a number from 0 to 65535".into())
}

pub(super) fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".into()),
        Ok(number) => Ok(number),
        Err(error) => Err(error.to_string()),
    }
}

/// Parses a count, or `auto` as 0.
pub(super) fn slots(text: &str) -> Result<usize, String> {
    if text == "auto" {
        return Ok(0);
    }
    positive(text).map_err(|reason| format!("{reason} (or be `auto`)"))
}

/// Parses a number of bytes, with or without a unit; `G` is short for `GiB`.
pub(super) fn size(text: &str) -> Result<u64, String> {
    let units = [("K", 10), ("M", 20), ("G", 30), ("T", 40), ("", 0)];
    let text = text.strip_suffix("iB").filter(|rest| rest.ends_with(['K', 'M', 'G', 'T'])).unwrap_or(text);
    let found = units.iter().find_map(|(unit, shift)| Some((text.strip_suffix(unit)?.trim(), *shift)));
    let bytes = found.and_then(|(number, shift)| number.parse::<u64>().ok()?.checked_mul(1 << shift));
    bytes.ok_or_else(|| "must be a whole number of bytes, or of KiB, MiB, GiB or TiB (K, M, G, T)".into())
}

/// Parses a size of at least one byte that fits into memory.
pub(super) fn bytes(text: &str) -> Result<usize, String> {
    match usize::try_from(size(text)?) {
        Ok(0) => Err("must be at least 1".into()),
        Ok(bytes) => Ok(bytes),
        Err(error) => Err(error.to_string()),
    }
}

/// An amount of space: bytes, or a share of a larger amount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Budget {
    Bytes(u64),
    Percent(u64),
}

impl Budget {
    /// Returns the bytes of this budget, as a part of `whole`.
    pub(crate) fn of(self, whole: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Percent(percent) => (u128::from(whole) * u128::from(percent) / 100) as u64,
        }
    }
}

pub(super) fn budget(text: &str) -> Result<Budget, String> {
    let Some(percent) = text.strip_suffix('%') else {
        return size(text).map(Budget::Bytes).map_err(|reason| format!("{reason}, or a percentage"));
    };
    match percent.trim().parse() {
        Ok(percent @ 1..=100) => Ok(Budget::Percent(percent)),
        _ => Err("must be a whole percentage from 1% to 100%".into()),
    }
}

/// Returns a parser of numbers from `least` to `most`.
pub(super) fn within(
    least: usize,
    most: usize,
) -> impl Fn(&str) -> Result<usize, String> + Clone + Send + Sync + 'static {
    move |text: &str| {
        let number = text.parse::<usize>().map_err(|error| error.to_string())?;
        if number < least {
            return Err(format!("must be at least {least}"));
        }
        if number > most {
            return Err(format!("must be at most {most}"));
        }
        Ok(number)
    }
}
