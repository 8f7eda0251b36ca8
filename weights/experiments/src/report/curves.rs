//! Validation losses during training: the mean over a mixer's seeds, from the step where it is low enough to compare.

use super::section::{color, spread};
use crate::scale::Kind;
use crate::svg::{Axis, Lines, Panel, Point, Series};

/// The highest loss shown, as a multiple of the worst mixer's final loss for curves, and of the best one for final
/// losses.
pub(super) const SHOWN: f64 = 1.3;

/// Returns the mean, lowest and highest loss over seeds, at steps that all of them have. seeds: (step, loss) of each
pub(super) fn mean(seeds: &[&[(f64, f64)]]) -> Vec<Point> {
    let Some((first, others)) = seeds.split_first() else { return Vec::new() };
    let at = |seed: &[(f64, f64)], step: f64| seed.iter().find(|(s, _)| *s == step).map(|(_, loss)| *loss);
    let point = |&(step, loss): &(f64, f64)| {
        let mut losses = vec![loss];
        for seed in others {
            losses.push(at(seed, step)?);
        }
        spread(&losses).map(|(y, low, high)| Point { x: step, y, low, high })
    };
    first.iter().filter_map(point).collect()
}

/// The panel of the mixers' curves; `None` if no curve has points.
pub(super) fn panel(title: &str, curves: Vec<(String, Vec<Point>)>, unit: &str) -> Option<Panel> {
    let line = |(mixer, points): (String, Vec<Point>)| {
        let color = color(&mixer);
        Series { label: mixer, color, dash: "", points }
    };
    let mut series: Vec<Series> = curves.into_iter().map(line).collect();
    // All mixers drop alike in the first steps, which would compress the differences.
    let worst = series.iter().filter_map(|series| series.points.last()).map(|end| end.y).fold(0.0, f64::max);
    let most = SHOWN * worst;
    for series in &mut series {
        series.points.retain(|point| point.y <= most);
    }
    series.iter().any(|series| !series.points.is_empty()).then(|| {
        Panel::Lines(Lines {
            title: format!("{title}; the mean of the seeds, with the least and the most"),
            across: Axis { label: "steps".into(), kind: Kind::Linear },
            up: Axis { label: format!("validation loss, {unit}; from where it is below {most:.2}"), kind: Kind::Log },
            series,
        })
    })
}
