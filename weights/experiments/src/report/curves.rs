//! Validation losses while training: the mean of a mixer's seeds, from where it has fallen far enough to be told apart.

use crate::scale::Kind;
use crate::svg::{Axis, Lines, Panel, Point, Series};
use super::{color, spread};

/// Losses that the picture shows, in those that the worst mixer ends with.
const SHOWN: f64 = 1.3;

/// The mean of the seeds' losses, with the least and the most, at steps that all of them have. Of a seed: (step, loss).
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

/// The panel of some mixers' curves; none where no curve has points.
pub(super) fn panel(curves: Vec<(String, Vec<Point>)>, unit: &str) -> Option<Panel> {
    let line = |(mixer, points): (String, Vec<Point>)| {
        let color = color(&mixer);
        Series { label: mixer, color, dash: "", points }
    };
    let mut series: Vec<Series> = curves.into_iter().map(line).collect();
    // The first steps' fall is the same for all and would press what differs into a corner.
    let worst = series.iter().filter_map(|series| series.points.last()).map(|end| end.y).fold(0.0, f64::max);
    let most = SHOWN * worst;
    for series in &mut series {
        series.points.retain(|point| point.y <= most);
    }
    series.iter().any(|series| !series.points.is_empty()).then(|| {
        Panel::Lines(Lines {
            title: "while training; the mean of the seeds, with the least and the most".into(),
            across: Axis { label: "steps".into(), kind: Kind::Linear },
            up: Axis { label: format!("validation loss, {unit}; from where it is below {most:.2}"), kind: Kind::Log },
            series,
        })
    })
}
