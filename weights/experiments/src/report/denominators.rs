//! The shares of clamped denominators by sigma and D.

use std::path::Path;

use super::section::{Section, checked, table};
use crate::denominators::Row;
use crate::record::{Record, RecordError};
use crate::scale::Kind;
use crate::svg::{Axis, Lines, Panel, Picture, Point, Series};

/// Colors, from few random vectors to many.
const COLORS: [&str; 7] = ["#d4a72c", "#e08855", "#cf222e", "#8250df", "#0969da", "#1b7c83", "#24292f"];

pub(super) fn section(path: &Path, record: &Record<Row>) -> Result<Section, RecordError> {
    for (at, row) in record.rows.iter().enumerate() {
        checked(path, &format!("rows[{at}].clamped"), row.clamped, |share| (0.0..=1.0).contains(&share))?;
        checked(path, &format!("rows[{at}].not_positive"), row.not_positive.unwrap_or(0.0), |s| {
            (0.0..=1.0).contains(&s)
        })?;
        checked(path, &format!("rows[{at}].sigma"), row.sigma, |sigma| sigma > 0.0)?;
    }
    let mut gates: Vec<Option<f64>> = Vec::new();
    let (mut dims, mut sigmas): (Vec<usize>, Vec<f64>) = (Vec::new(), Vec::new());
    for row in &record.rows {
        if !gates.contains(&row.gate_half_life) {
            gates.push(row.gate_half_life);
        }
        dims.push(row.proj_dim);
        sigmas.push(row.sigma);
    }
    dims.sort_unstable();
    dims.dedup();
    sigmas.sort_by(f64::total_cmp);
    sigmas.dedup();
    let of = |gate: Option<f64>, dim: usize, sigma: f64| {
        let same = |row: &&Row| row.gate_half_life == gate && row.proj_dim == dim && row.sigma == sigma;
        record.rows.iter().find(same)
    };
    let share = |gate, dim, sigma| of(gate, dim, sigma).map(|row| 100.0 * row.clamped);
    let panel = |&gate: &Option<f64>| {
        let line = |(at, &dim): (usize, &usize)| Series {
            label: format!("% at D = {dim}"),
            color: COLORS[at % COLORS.len()],
            dash: "",
            points: sigmas
                .iter()
                .filter_map(|&x| share(gate, dim, x).map(|y| Point { x, y, low: y, high: y }))
                .collect(),
        };
        Panel::Lines(Lines {
            title: title(gate),
            across: Axis { label: "sigma".into(), kind: Kind::Linear },
            up: Axis { label: "clamped denominators, %".into(), kind: Kind::Linear },
            series: dims.iter().enumerate().map(line).collect(),
        })
    };
    let markdown = |&gate: &Option<f64>| {
        let mut headings = vec![format!("{}: sigma", title(gate))];
        headings.extend(dims.iter().map(|dim| format!("D = {dim}")));
        let line = |&sigma: &f64| {
            let cell = |&dim: &usize| match of(gate, dim, sigma) {
                None => "-".into(),
                Some(Row { clamped, not_positive: None, .. }) => format!("{:.2} %", 100.0 * clamped),
                Some(Row { clamped, not_positive: Some(share), .. }) => {
                    format!("{:.2} % ({:.2} %)", 100.0 * clamped, 100.0 * share)
                }
            };
            [vec![sigma.to_string()], dims.iter().map(cell).collect()].concat()
        };
        table(&headings, &sigmas.iter().map(line).collect::<Vec<_>>())
    };
    let note = if record.rows.iter().any(|row| row.not_positive.is_some()) {
        "\nIn parentheses: the share of denominators at or below zero. These are errors of the estimate, because the \
         kernel is positive. From a sigma of about 2, however, the kernel itself is as small as the floor.\n"
    } else {
        ""
    };
    Ok(Section {
        title: "Clamped denominators".into(),
        picture: Picture {
            title: "Denominators that the clamp holds".into(),
            subtitle: "random queries and keys of unit length, Gaussian map".into(),
            panels: gates.iter().map(panel).collect(),
        },
        text: gates.iter().map(markdown).collect::<Vec<_>>().join("\n") + note,
    })
}

fn title(gate: Option<f64>) -> String {
    gate.map_or_else(|| "without a gate".into(), |life| format!("with a gate of half-life {life}"))
}
