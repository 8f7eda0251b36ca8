//! Linear and logarithmic plot scales, and the tick values of an axis.

/// On a logarithmic axis with a zero, which has no logarithm, the share of the axis between zero and the smallest
/// positive value.
const ZERO_GAP: f64 = 0.12;
/// Steps within a decade at which axes are labeled.
const STEPS: [f64; 3] = [1.0, 2.0, 5.0];
/// The maximum number of labels on an axis.
const TICKS: usize = 9;

/// How values map to lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Equal differences are equal lengths.
    Linear,
    /// Equal ratios are equal lengths.
    Log,
}

/// Maps values from `low` to `high` to positions from `from` to `to`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scale {
    kind: Kind,
    low: f64,
    high: f64,
    from: f64,
    to: f64,
    zero: Option<f64>, // the position of zero on a logarithmic scale that has it
}

impl Scale {
    /// A scale between two bounds, which must be positive if it is logarithmic.
    pub(crate) fn new(kind: Kind, (low, high): (f64, f64), from: f64, to: f64) -> Self {
        Self { kind, low, high, from, to, zero: None }
    }

    /// A scale from the lowest to the highest value. A logarithmic one may include zero.
    pub(crate) fn fit(kind: Kind, values: &[f64], from: f64, to: f64) -> Self {
        let shown = || values.iter().copied().filter(|&value| kind == Kind::Linear || value > 0.0);
        let (low, high) = (shown().fold(f64::INFINITY, f64::min), shown().fold(f64::NEG_INFINITY, f64::max));
        let zero = (kind == Kind::Log && high.is_finite() && values.contains(&0.0)).then_some(from);
        let from = if zero.is_some() { from + ZERO_GAP * (to - from) } else { from };
        Self { kind, low, high, from, to, zero }
    }

    /// The position of a value; the middle if all values are equal.
    pub(crate) fn at(&self, value: f64) -> f64 {
        let part = match (self.kind, self.zero) {
            (Kind::Log, Some(zero)) if value <= 0.0 => return zero,
            _ if self.high <= self.low => 0.5,
            (Kind::Linear, _) => (value - self.low) / (self.high - self.low),
            // A whisker that reaches zero ends at the lower bound.
            (Kind::Log, _) => (value.max(self.low) / self.low).ln() / (self.high / self.low).ln(),
        };
        self.from + part * (self.to - self.from)
    }
}

/// The round values just below the lowest and just above the highest of `values`.
pub(crate) fn bounds(kind: Kind, values: impl IntoIterator<Item = f64>) -> (f64, f64) {
    let positive = |value: &f64| kind == Kind::Linear || *value > 0.0;
    let (low, high) = values
        .into_iter()
        .filter(positive)
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
    if !low.is_finite() || !high.is_finite() {
        return (1.0, 10.0); // no value fits on the scale
    }
    let step = step(low, high);
    let (below, above) = ((low / step).floor() * step, (high / step).ceil() * step);
    if kind == Kind::Linear || (near((low, high)) && below > 0.0) {
        return (below, if above > below { above } else { below + step });
    }
    let (first, last) = ((low.log10().floor() as i32) - 1, (high.log10().ceil() as i32) + 1);
    let round = decades(first..=last);
    let below = round.iter().copied().rfind(|&value| value <= low * 1.000_001).unwrap_or(low);
    let above = round.iter().copied().find(|&value| value >= high * 0.999_999 && value > below).unwrap_or(high);
    (below, above)
}

/// Whether a range is too small for the steps of a decade.
fn near((low, high): (f64, f64)) -> bool {
    high / low < 4.0
}

fn decades(range: impl Iterator<Item = i32>) -> Vec<f64> {
    range.flat_map(|decade| STEPS.map(|step| step * 10f64.powi(decade))).collect()
}

/// A round step that divides a range into about six parts.
fn step(low: f64, high: f64) -> f64 {
    let rough = if high > low { (high - low) / 6.0 } else { high.abs().max(1.0) / 6.0 };
    let decade = rough.log10().floor() as i32;
    decades(decade..=decade + 1).into_iter().find(|&step| step >= rough).unwrap_or(rough)
}

/// Round values from `low` to `high`. A logarithmic scale has only powers of ten if there would be too many values, and
/// equal steps if its range is small.
pub(crate) fn ticks(kind: Kind, (low, high): (f64, f64)) -> Vec<f64> {
    if kind == Kind::Linear || near((low, high)) {
        let step = step(low, high);
        let (first, last) = ((low / step - 1e-6).ceil() as i64, (high / step + 1e-6).floor() as i64);
        return (first..=last).map(|i| i as f64 * step).collect();
    }
    let range = low.log10().floor() as i32..=high.log10().ceil() as i32;
    let within = |value: &f64| *value >= low * 0.999 && *value <= high * 1.001;
    let every: Vec<f64> = decades(range.clone()).into_iter().filter(within).collect();
    if every.len() <= TICKS { every } else { range.map(|decade| 10f64.powi(decade)).filter(within).collect() }
}

/// Moves positions apart until all are at least `gap` from each other. They stay near their original positions, and
/// between `low` and `high` if there is room.
pub(crate) fn apart(places: &[f64], gap: f64, low: f64, high: f64) -> Vec<f64> {
    let mut order: Vec<usize> = (0..places.len()).collect();
    order.sort_by(|&a, &b| places[a].total_cmp(&places[b]));
    // One pass goes down, one up, each keeping the distances; the result is the middle of both.
    let mut down = vec![0.0; places.len()];
    let mut least = low;
    for &at in &order {
        down[at] = places[at].max(least);
        least = down[at] + gap;
    }
    let mut up = vec![0.0; places.len()];
    let mut most = high;
    for &at in order.iter().rev() {
        up[at] = places[at].min(most);
        most = up[at] - gap;
    }
    let mut moved = vec![0.0; places.len()];
    let mut least = low;
    for (rank, &at) in order.iter().enumerate() {
        let room_below = high - (order.len() - 1 - rank) as f64 * gap;
        moved[at] = f64::midpoint(down[at], up[at]).min(room_below).max(least);
        least = moved[at] + gap;
    }
    moved
}

/// Formats a number in a few characters: `32,768`, `1.5 M`, `0.05`, `2e-5`.
pub(crate) fn short(value: f64) -> String {
    let plain = |value: f64| {
        let text = format!("{value:.4}");
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    };
    match value.abs() {
        0.0 => "0".into(),
        size if size >= 1e9 => format!("{} G", plain((value / 1e8).round() / 10.0)),
        size if size >= 1e6 => format!("{} M", plain((value / 1e5).round() / 10.0)),
        size if size >= 1000.0 => tidegate_weights::terminal::grouped(value.round() as u64),
        size if size < 1e-3 => format!("{value:.0e}"),
        _ => plain(value),
    }
}

/// Formats a measured number with three significant digits.
pub(crate) fn digits(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        size if size >= 1000.0 => short(value),
        size if size < 1e-3 => format!("{value:.2e}"),
        size => format!("{value:.*}", (2 - size.log10().floor() as i32).max(0) as usize),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_ratios_or_differences_are_equal_lengths() {
        let log = Scale::new(Kind::Log, (1.0, 1000.0), 300.0, 0.0);
        assert_eq!(
            [1.0, 10.0, 100.0, 1000.0, 0.0].map(|value| log.at(value).round()),
            [300.0, 200.0, 100.0, 0.0, 300.0]
        );
        let linear = Scale::new(Kind::Linear, (0.0, 4.0), 0.0, 100.0);
        assert_eq!([0.0, 1.0, 4.0].map(|value| linear.at(value)), [0.0, 25.0, 100.0]);
    }

    #[test]
    fn zero_and_a_single_value_have_places() {
        let scale = Scale::fit(Kind::Log, &[0.0, 512.0, 2048.0, 32_768.0], 100.0, 200.0);
        assert_eq!((scale.at(0.0), scale.at(512.0), scale.at(32_768.0)), (100.0, 112.0, 200.0));
        assert_eq!(Scale::fit(Kind::Log, &[7.0], 0.0, 100.0).at(7.0), 50.0);
        assert_eq!(Scale::fit(Kind::Linear, &[0.0, 2.0], 0.0, 100.0).at(0.0), 0.0);
    }

    #[test]
    fn bounds_and_ticks_are_round_values() {
        let rounded = |value: f64| (value * 1e9).round() / 1e9;
        let bounds = |kind, values: &[f64]| {
            let (low, high) = bounds(kind, values.iter().copied());
            (rounded(low), rounded(high))
        };
        let ticks = |kind, range| ticks(kind, range).into_iter().map(rounded).collect::<Vec<_>>();
        assert_eq!(bounds(Kind::Log, &[53.0, 1170.0]), (50.0, 2000.0));
        assert_eq!(ticks(Kind::Log, (50.0, 2000.0)), [50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0]);
        assert_eq!(bounds(Kind::Log, &[0.0, 0.03, 0.17]), (0.02, 0.2));
        assert_eq!(bounds(Kind::Log, &[53.0, 117.0]), (40.0, 120.0), "near each other");
        assert_eq!(ticks(Kind::Log, (40.0, 120.0)), [40.0, 60.0, 80.0, 100.0, 120.0]);
        assert_eq!(ticks(Kind::Linear, (0.0, 14.0)), [0.0, 5.0, 10.0], "none past the end");
        assert_eq!(ticks(Kind::Log, (1.0, 10_000.0)), [1.0, 10.0, 100.0, 1000.0, 10_000.0]);
        assert_eq!(bounds(Kind::Linear, &[1.71, 2.13]), (1.7, 2.2));
        assert_eq!(ticks(Kind::Linear, (0.0, 10.0)), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        let (low, high) = bounds(Kind::Linear, &[3.0, 3.0]);
        assert!(low <= 3.0 && high > low);
        assert_eq!(bounds(Kind::Log, &[0.0]), (1.0, 10.0));
    }

    #[test]
    fn labels_keep_apart_and_inside() {
        assert_eq!(apart(&[10.0, 50.0], 10.0, 0.0, 100.0), [10.0, 50.0], "distant labels stay");
        assert_eq!(apart(&[50.0, 50.0, 90.0], 10.0, 0.0, 100.0), [45.0, 55.0, 90.0]);
        let many = apart(&[3.0, 1.0, 2.0, 95.0, 98.0, 99.0, 50.0], 10.0, 0.0, 100.0);
        let mut sorted = many.clone();
        sorted.sort_by(f64::total_cmp);
        assert!(sorted.windows(2).all(|pair| pair[1] - pair[0] > 9.999), "{many:?}");
        assert!(sorted[0] >= 0.0 && sorted[6] <= 100.0 && many[1] < many[2] && many[2] < many[0], "{many:?}");
    }

    #[test]
    fn numbers_are_short() {
        let texts = [0.0, 0.5, 0.05, 2e-5, 512.0, 32_768.0, 1_000_000.0, 1_550_000.0, 2.5e9].map(short);
        assert_eq!(texts, ["0", "0.5", "0.05", "2e-5", "512", "32,768", "1 M", "1.6 M", "2.5 G"]);
        assert_eq!([1.776_1, 0.0371, 12.34, 123.4, 4e-5].map(digits), ["1.78", "0.0371", "12.3", "123", "4.00e-5"]);
    }
}
