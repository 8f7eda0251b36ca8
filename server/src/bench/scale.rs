//! Logarithmic scales: the positions of values, and the ticks of an axis.

/// The share of an axis between zero, which has no logarithm, and the least value above it.
const ZERO_GAP: f64 = 0.12;
/// Round values in a decade.
const STEPS: [f64; 3] = [1.0, 2.0, 5.0];
/// Most ticks of an axis.
const TICKS: usize = 9;

/// Maps values from `low` to `high` to positions from `from` to `to`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
    /// The position of zero, if it is among the values and not alone.
    zero: Option<f64>,
}

impl Scale {
    /// A scale between two bounds above zero.
    pub(super) fn new((low, high): (f64, f64), from: f64, to: f64) -> Self {
        Self { low, high, from, to, zero: None }
    }

    /// The smallest scale for all the values, which may include zero.
    pub(super) fn fit(values: &[f64], from: f64, to: f64) -> Self {
        let above = || values.iter().copied().filter(|&value| value > 0.0);
        let (low, high) = (above().fold(f64::INFINITY, f64::min), above().fold(0.0, f64::max));
        let zero = (high > 0.0 && values.contains(&0.0)).then_some(from);
        let from = if zero.is_some() { from + ZERO_GAP * (to - from) } else { from };
        Self { low, high, from, to, zero }
    }

    /// The position of a value: the middle if it is the only one, the end if there is only zero besides.
    pub(super) fn at(&self, value: f64) -> f64 {
        let part = match self.zero {
            Some(zero) if value <= 0.0 => return zero,
            _ if self.high > self.low => (value / self.low).ln() / (self.high / self.low).ln(),
            Some(_) => 1.0,
            None => 0.5,
        };
        self.from + part * (self.to - self.from)
    }

    /// The position of the break between zero and the values above it.
    pub(super) fn broken_at(&self) -> Option<f64> {
        self.zero.map(|zero| f64::midpoint(zero, self.from))
    }
}

/// The round values (1, 2, 5, 10, …) just below the least and just above the greatest of `values`, which are positive.
pub(super) fn bounds(values: impl IntoIterator<Item = f64>) -> (f64, f64) {
    let (low, high) =
        values.into_iter().fold((f64::INFINITY, 0.0f64), |(low, high), value| (low.min(value), high.max(value)));
    let (first, last) = ((low.log10().floor() as i32) - 1, (high.log10().ceil() as i32) + 1);
    let counted: Vec<f64> = (first..=last).flat_map(|decade| STEPS.map(|step| step * 10f64.powi(decade))).collect();
    let below = counted.iter().copied().rfind(|&value| value <= low).unwrap_or(low);
    let above = counted.iter().copied().find(|&value| value >= high && value > below).unwrap_or(high);
    (below, above)
}

/// The round values from `low` to `high`, or only the powers of ten if they are too many.
pub(super) fn ticks((low, high): (f64, f64)) -> Vec<f64> {
    let decades = low.log10().floor() as i32..=high.log10().ceil() as i32;
    let within = |value: &f64| *value >= low * 0.999 && *value <= high * 1.001;
    let every: Vec<f64> =
        decades.clone().flat_map(|decade| STEPS.map(|step| step * 10f64.powi(decade))).filter(within).collect();
    if every.len() <= TICKS { every } else { decades.map(|decade| 10f64.powi(decade)).filter(within).collect() }
}

/// Moves positions apart by at least `gap`, as little as possible, and keeps them between `low` and `high` if there is
/// room.
pub(super) fn apart(places: &[f64], gap: f64, low: f64, high: f64) -> Vec<f64> {
    let mut order: Vec<usize> = (0..places.len()).collect();
    order.sort_by(|&a, &b| places[a].total_cmp(&places[b]));
    // Groups of touching neighbours, each centred on the mean position of its members.
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let reach = |group: &[usize]| {
        let wanted = group.iter().enumerate().map(|(i, &at)| places[at] - i as f64 * gap).sum::<f64>();
        let span = (group.len() - 1) as f64 * gap;
        let start = (wanted / group.len() as f64).min(high - span).max(low);
        (start, start + span)
    };
    for at in order {
        let mut group = vec![at];
        while let Some(before) = groups.pop_if(|before| reach(before).1 + gap > reach(&group).0) {
            group = [before, group].concat();
        }
        groups.push(group);
    }
    let mut moved = vec![0.0; places.len()];
    for group in &groups {
        let (start, _) = reach(group);
        for (i, &at) in group.iter().enumerate() {
            moved[at] = start + i as f64 * gap;
        }
    }
    moved
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_ratios_are_equal_lengths() {
        let scale = Scale::new((1.0, 1000.0), 300.0, 0.0);
        assert_eq!([1.0, 10.0, 100.0, 1000.0].map(|value| scale.at(value).round()), [300.0, 200.0, 100.0, 0.0]);
        assert_eq!(scale.broken_at(), None);
    }

    #[test]
    fn zero_has_a_position_of_its_own() {
        let scale = Scale::fit(&[0.0, 512.0, 2048.0, 32_768.0], 100.0, 200.0);
        assert_eq!((scale.at(0.0), scale.at(512.0), scale.at(32_768.0)), (100.0, 112.0, 200.0));
        assert_eq!(scale.broken_at(), Some(106.0));
        assert_eq!(Scale::fit(&[1.0, 32.0], 100.0, 200.0).at(1.0), 100.0);
        assert_eq!(Scale::fit(&[0.0, 512.0], 100.0, 200.0).at(512.0), 200.0);
    }

    #[test]
    fn a_single_value_is_in_the_middle() {
        for values in [&[0.0][..], &[7.0]] {
            let scale = Scale::fit(values, 0.0, 100.0);
            assert_eq!(scale.at(values[0]), 50.0, "{values:?}");
        }
        assert_eq!(Scale::fit(&[0.0], 0.0, 100.0).broken_at(), None);
    }

    #[test]
    fn bounds_and_ticks_are_round_values() {
        assert_eq!(bounds([53.0, 117.0]), (50.0, 200.0));
        assert_eq!(ticks((50.0, 200.0)), [50.0, 100.0, 200.0]);
        assert_eq!(bounds([100.0, 100.0]), (100.0, 200.0));
        assert_eq!(bounds([0.03, 0.07]), (0.02, 0.1));
        assert_eq!(ticks((1.0, 100_000.0)), [1.0, 10.0, 100.0, 1000.0, 10_000.0, 100_000.0]);
    }

    #[test]
    fn labels_keep_apart_and_inside() {
        assert_eq!(apart(&[10.0, 50.0], 10.0, 0.0, 100.0), [10.0, 50.0], "labels that are far enough apart stay");
        assert_eq!(apart(&[50.0, 50.0, 90.0], 10.0, 0.0, 100.0), [45.0, 55.0, 90.0]);
        assert_eq!(apart(&[99.0, 100.0, 100.0], 10.0, 0.0, 100.0), [80.0, 90.0, 100.0]);
        let many = apart(&[3.0, 1.0, 2.0, 95.0, 98.0, 99.0, 50.0], 10.0, 0.0, 100.0);
        let mut sorted = many.clone();
        sorted.sort_by(f64::total_cmp);
        assert!(sorted.windows(2).all(|pair| pair[1] - pair[0] > 9.999), "{many:?}");
        assert!(sorted[0] >= 0.0 && sorted[6] <= 100.0 && many[1] < many[2] && many[2] < many[0], "{many:?}");
    }
}
