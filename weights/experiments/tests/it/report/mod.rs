//! Pictures and tables of made-up measurements, and errors about malformed files.

mod verdicts;

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use tidegate_experiments::report::report;

const MIXERS: [&str; 7] = ["softmax", "elu", "favor", "rfa", "rfa-gate", "rfa-gate-stateful", "hybrid"];

fn write(folder: &Path, name: &str, experiment: &str, settings: &Value, rows: &[Value]) {
    let record = json!({
        "experiment": experiment, "command": format!("measure {experiment}"), "machine": "2 cores of a <machine>",
        "date": "2026-02-03", "settings": settings, "rows": rows,
    });
    fs::write(folder.join(name), serde_json::to_string(&record).unwrap()).unwrap();
}

fn language() -> Vec<Value> {
    let row = |(at, mixer): (usize, &&str)| {
        let end = 1.9 - 0.03 * at as f64;
        let seed = |seed: u32| {
            let curve: Vec<_> = (0..=20)
                .map(|i| json!([i * 100, end + 2.0 * (-f64::from(i) / 4.0).exp() + 0.01 * f64::from(seed)]))
                .collect();
            let loss = end + 0.01 * f64::from(seed);
            let carried = if *mixer == "softmax" { 0.02 } else { 0.05 };
            let stream = (*mixer == "softmax" || mixer.contains("rfa")).then_some(loss - carried);
            json!({"seed": seed, "loss": loss, "stream_loss": stream, "seconds": 120.0, "curve": curve})
        };
        let judged = if *mixer == "rfa-gate-stateful" { "stream_loss" } else { "loss" };
        json!({"mixer": mixer, "parameters": 800_000 + at, "state_bytes": 66_000, "judged": judged,
               "seeds": [seed(1), seed(2), seed(3)]})
    };
    MIXERS.iter().enumerate().map(row).collect()
}

fn cost() -> Vec<Value> {
    let mut rows = Vec::new();
    for (at, mixer) in ["softmax", "rfa-gate", "hybrid"].into_iter().enumerate() {
        for depth in [512u32, 2048, 8192, 65_536] {
            let cache = if at == 0 { f64::from(depth) } else { 100.0 + 60.0 * at as f64 };
            for (kind, batch) in [("decode", 1), ("decode", 16), ("prefill", 1)] {
                let speed = f64::from(batch).sqrt() * 1e6 / (500.0 + cache);
                rows.push(
                    json!({"mixer": mixer, "kind": kind, "batch": batch, "depth": depth, "tokens_per_second": speed,
                                 "low": 0.9 * speed, "high": 1.05 * speed, "state_bytes": (cache * 2048.0) as u64}),
                );
            }
        }
    }
    rows
}

fn approximation() -> Vec<Value> {
    let mut rows = Vec::new();
    for inputs in ["model", "correlated", "independent"] {
        rows.push(json!({"inputs": inputs, "estimator": "mean-of-v", "samples": 0, "error": 0.2, "error_low": 0.2, "error_high": 0.2}));
        for (at, estimator) in ["rfa", "favor", "lara", "lara-balance", "ra"].into_iter().enumerate() {
            for samples in [1, 4, 16, 64, 256] {
                let error = 0.3 / (1.0 + at as f64) / f64::from(samples).sqrt();
                rows.push(json!({"inputs": inputs, "estimator": estimator, "samples": samples, "error": error,
                                 "error_low": 0.9 * error, "error_high": 1.2 * error}));
            }
        }
    }
    rows
}

fn denominators() -> Vec<Value> {
    let mut rows = Vec::new();
    for half_life in [json!(null), json!(64.0)] {
        for sigma in [1.0f64, 1.5, 2.0] {
            for dim in [16, 64, 256] {
                let clamped = 0.5 * (sigma - 1.0).powi(2) / f64::from(dim).sqrt();
                rows.push(json!({"sigma": sigma, "proj_dim": dim, "gate_half_life": half_life, "clamped": clamped}));
            }
        }
    }
    rows
}

fn listops() -> Vec<Value> {
    let row = |(at, mixer): (usize, &&str)| {
        let seed = |seed: u32| {
            json!({"seed": seed, "accuracy": 0.35 + 0.01 * at as f64 + 0.003 * f64::from(seed), "loss": 1.6, "steps": 2000,
                   "sequences_per_second": 40.0})
        };
        json!({"mixer": mixer, "parameters": 200_000, "seeds": [seed(1), seed(2)]})
    };
    MIXERS[..5].iter().enumerate().map(row).collect()
}

fn recipe() -> Vec<Value> {
    let row = |variant: &str, changes: Value, losses: &[f64]| {
        let seed = |(at, loss): (usize, &f64)| json!({"seed": at + 1, "loss": loss, "curve": [[40, 2.5]]});
        json!({"variant": variant, "changes": changes, "cost": 1.25, "parameters": 5_900_000, "steps": 96, "tokens": 393_216,
               "seeds": losses.iter().enumerate().map(seed).collect::<Vec<_>>()})
    };
    vec![
        row("as-shipped", json!({}), &[2.0, 2.02]),
        row("gated", json!({"mixer": "output-gate"}), &[2.05]),
        row("long", json!({"train": {"half_life_min": 16.0, "half_life_max": 4096.0}}), &[2.03, 2.03]),
    ]
}

fn translation() -> Vec<Value> {
    let row = |at: u32, mixer: &str, seeds: &[u32]| {
        let seed = |seed: u32| {
            let end = 1.8 + 0.04 * f64::from(at) + 0.01 * f64::from(seed);
            let curve: Vec<_> = (1..=20).map(|i| json!([i * 250, end + 2.0 * (-f64::from(i) / 4.0).exp()])).collect();
            json!({"seed": seed, "bleu": 34.5 - 0.8 * f64::from(at) + (0.2 + 0.1 * f64::from(at)) * f64::from(seed), "loss": end, "valid_loss": end,
                   "seconds": 1200.0, "decode_tokens_per_second": 900.5, "curve": curve, "machine": "x"})
        };
        json!({"mixer": mixer, "parameters": 9_000_000 + at, "state_bytes": 798_816, "state_bytes_filled": 120_000 + at,
               "bleu_signature": "nrefs:1|case:mixed", "seeds": seeds.iter().map(|&at| seed(at)).collect::<Vec<_>>()})
    };
    // A seed that softmax lacks counts in the mean but not in the difference.
    vec![row(1, "rfa-gate", &[2, 1, 3]), row(0, "softmax", &[2, 1])]
}

fn translation_cost() -> Vec<Value> {
    let mut rows = Vec::new();
    for source in [16u32, 64, 256, 1024, 4096] {
        for (mixer, speed) in [("rfa-gate", 2000.0), ("softmax", 2e6 / (900.0 + 2.0 * f64::from(source)))] {
            let over = (mixer == "rfa-gate").then_some((900.0 + 2.0 * f64::from(source)) / 1000.0);
            let filled = if mixer == "softmax" { 24_576 * u64::from(source + 34) } else { 3_194_880 };
            rows.push(
                json!({"mixer": mixer, "source": source, "batch": 16, "tokens_per_second": speed, "low": 0.9 * speed,
                             "high": 1.05 * speed, "state_bytes": 101_498_880, "state_bytes_filled": filled,
                             "read_ms": 0.3 * f64::from(source), "over_softmax": over}),
            );
        }
    }
    rows
}

#[test]
fn every_experiment_has_a_picture_and_a_table() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let unit = json!({"corpus": "Tiny Shakespeare", "unit": "nats per character", "layers": 4});
    write(folder, "language-shakespeare.json", "language", &unit, &language());
    write(folder, "recipe.json", "recipe", &json!({}), &recipe());
    write(folder, "approximation.json", "approximation", &json!({"seeds": 5}), &approximation());
    write(folder, "denominators.json", "denominators", &json!({}), &denominators());
    write(folder, "listops.json", "listops", &json!({}), &listops());
    write(folder, "passages.json", "passages", &json!({}), &listops());
    write(folder, "cost.json", "cost", &json!({}), &cost());
    write(folder, "translation.json", "translation", &json!({"unit": "nats per target token"}), &translation());
    write(folder, "translation-cost.json", "translation-cost", &json!({}), &translation_cost());
    fs::write(folder.join("notes.json"), "another's").unwrap();
    let written = report(folder).unwrap();
    let names: Vec<_> = written.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
    let all = [
        "language-shakespeare.svg",
        "recipe.svg",
        "approximation.svg",
        "denominators.svg",
        "listops.svg",
        "passages.svg",
        "cost.svg",
        "translation.svg",
        "translation-cost.svg",
        "REPORT.md",
    ];
    assert_eq!(names, all);
    for picture in &written[..9] {
        let svg = fs::read_to_string(picture).unwrap();
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{}: {svg}", picture.display());
        for tag in ["text", "tspan", "svg", "title"] {
            let open = svg.matches(&format!("<{tag} ")).count() + svg.matches(&format!("<{tag}>")).count();
            assert_eq!(open, svg.matches(&format!("</{tag}>")).count(), "{}: {tag}", picture.display());
        }
    }
    let text = fs::read_to_string(&written[9]).unwrap();
    for part in [
        "![Language models on Tiny Shakespeare](language-shakespeare.svg)",
        "| rfa-gate-stateful | 1.770 (1.760 to 1.780) | -0.150 | **1.720 (1.710 to 1.730)** | **-0.180** | 800,005 | 66,000 | 2.0 |",
        "| rfa-gate | **1.800 (1.790 to 1.810)** | **-0.120** | 1.750 (1.740 to 1.760) | -0.150 |",
        "| elu | **1.890 (1.880 to 1.900)** | **-0.030** | - | - |",
        "Losses and differences are means over 3 seeds, with the lowest and highest in parentheses.",
        "`measure language`, on 2 cores of a <machine>, 2026-02-03.",
        "- corpus: Tiny Shakespeare",
        "| gated | mixer output-gate | 2.0500 | +0.0500 | 1.25 | 96 | 5,900,000 |",
        "| as-shipped |  | 2.0100 (2.0000 to 2.0200) | - |",
        "| long | half_life_min 16.0, half_life_max 4096.0 | 2.0300 (2.0300 to 2.0300) | +0.0200 (+0.0100 to +0.0300) |",
        "| ra | 0.0600 | 0.0300 | 0.0150 | 0.00750 | 0.00375 | 30 % |",
        "| 1.5 | 3.12 % | 1.56 % | 0.78 % |",
        "| elu | 36.5 (36.3 to 36.6) | 1.600 (1.600 to 1.600) | 40.0 (40.0 to 40.0) | 2,000 | 200,000 |",
        "| decoding, 16 rows at once, ms a token after | 512 | 2,048 | 8,192 | 65,536 | state bytes at the longest |",
        "| softmax | **34.80** | 34.70, 34.90 | +0.00 | 1.815 (1.810 to 1.820) | 9,000,000 | 798,816 | 120,000 | 20.0 |",
        "| rfa-gate | **34.30** | 34.00, 34.30, 34.60 | -0.65 (-0.70 to -0.60) | 1.860 (1.850 to 1.870) | 9,000,001 | 798,816 | 120,001 | 20.0 |",
        "SacreBLEU signature: `nrefs:1|case:mixed`.",
        "| 4,096 | 2,000 (1,800 to 2,100) | 220 (198 to 231) | 9.09 | 3,194,880 | 101,498,880 | 1,229 | 1,229 |",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    // For inspection, a folder named by TIDEGATE_PICTURES gets copies.
    if let Ok(kept) = std::env::var("TIDEGATE_PICTURES") {
        for path in &written {
            fs::copy(path, Path::new(&kept).join(path.file_name().unwrap())).unwrap();
        }
    }
}

/// Returns the panel of a picture under a heading.
fn panel<'a>(svg: &'a str, heading: &str) -> &'a str {
    let (_, rest) = svg.split_once(&format!(">{heading}")).unwrap_or_else(|| panic!("no panel {heading}: {svg}"));
    rest.split("font-weight=\"bold\">at the end of").next().unwrap().split("font-weight=\"bold\">while").next().unwrap()
}

/// Regression: the stateful mixer's stream loss was drawn among block losses, with softmax's block loss as the mark.
#[test]
fn losses_in_blocks_and_in_a_stream_share_no_panel_and_no_difference() {
    let folder = tempfile::tempdir().unwrap();
    let mut rows = language();
    // Without a gate, rfa does badly on the stream.
    for seed in rows[3]["seeds"].as_array_mut().unwrap() {
        seed["stream_loss"] = json!(3.5);
    }
    write(folder.path(), "language-x.json", "language", &json!({}), &rows);
    report(folder.path()).unwrap();
    let svg = fs::read_to_string(folder.path().join("language-x.svg")).unwrap();
    let (blocks, stream) =
        (panel(&svg, "at the end of training, in blocks"), panel(&svg, "at the end of training, as one stream"));
    let order = |panel: &str, names: &[&str]| {
        let place =
            |mixer: &&str| panel.find(&format!(">{mixer}</text>")).unwrap_or_else(|| panic!("{mixer}: {panel}"));
        assert!(names.windows(2).all(|pair| place(&pair[0]) < place(&pair[1])), "{names:?}: {panel}");
    };
    order(blocks, &["hybrid", "rfa-gate-stateful", "rfa-gate", "rfa", "favor", "elu"]);
    order(stream, &["rfa-gate-stateful", "rfa-gate"]);
    assert!(blocks.contains(">1.770</text>"), "the stateful mixer's blocks: {blocks}");
    assert!(stream.contains(">1.720</text>"), "its stream: {stream}");
    for absent in [">elu<", ">hybrid<", ">rfa<"] {
        assert!(!stream.contains(absent), "{absent}: {stream}");
    }
    assert!(stream.contains("Not shown: rfa 3.500"), "{stream}");
    let curves = panel(&svg, "while training, in blocks");
    assert!(!curves.contains("rfa-gate-stateful") && curves.contains("rfa-gate"), "{curves}");
    assert!(!svg.contains("while training, as one stream"), "one curve is no comparison: {svg}");

    // Without softmax's stream loss, the others' have nothing to be compared with.
    for seed in rows[0]["seeds"].as_array_mut().unwrap() {
        seed["stream_loss"] = json!(null);
    }
    write(folder.path(), "language-x.json", "language", &json!({}), &rows);
    report(folder.path()).unwrap();
    let text = fs::read_to_string(folder.path().join("REPORT.md")).unwrap();
    for part in [
        "| rfa-gate-stateful | 1.770 (1.760 to 1.780) | -0.150 | **1.720 (1.710 to 1.730)** | - |",
        "| rfa-gate | **1.800 (1.790 to 1.810)** | **-0.120** | 1.750 (1.740 to 1.760) | - |",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
}

/// Regression: when all variants were worse, the mark of the unchanged recipe was left of the axis, among the names.
#[test]
fn a_mark_is_on_the_axis() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "recipe.json", "recipe", &json!({}), &recipe());
    report(folder.path()).unwrap();
    let svg = fs::read_to_string(folder.path().join("recipe.svg")).unwrap();
    let place = |name: &str| {
        let before = svg.split(&format!(">{name}</text>")).next().unwrap();
        before.rsplit_once("<text x=\"").unwrap().1.split('"').next().unwrap().parse::<f64>().unwrap()
    };
    assert!(place("unchanged") > place("gated"), "{svg}");
}

/// Regression: when built without the server, the report sorted the settings by name.
#[test]
fn settings_keep_their_order() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "cost.json", "cost", &json!({"shape": "12m", "batch": {"most": 16, "least": 1}}), &cost());
    report(folder.path()).unwrap();
    let text = fs::read_to_string(folder.path().join("REPORT.md")).unwrap();
    assert!(text.contains("- shape: 12m\n- batch: {\"most\":16, \"least\":1}\n"), "{text}");
}

#[test]
fn absent_files_are_no_fault_and_an_empty_folder_is() {
    let folder = tempfile::tempdir().unwrap();
    let message = report(folder.path()).unwrap_err().to_string();
    assert!(message.contains("holds no experiment"), "{message}");
    write(folder.path(), "denominators.json", "denominators", &json!({}), &denominators());
    assert_eq!(report(folder.path()).unwrap().len(), 2);
}

#[test]
fn malformed_files_are_named_with_the_field() {
    let complaint = |name: &str, experiment: &str, rows: &[Value]| {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), name, experiment, &json!({}), rows);
        report(folder.path()).unwrap_err().to_string()
    };
    let changed = |mut rows: Vec<Value>, pointer: &str, value: Value| {
        *rows[1].pointer_mut(pointer).unwrap() = value;
        rows
    };
    for (name, experiment, rows, part) in [
        (
            "approximation.json",
            "cost",
            approximation(),
            "approximation.json: experiment: must be approximation, found cost",
        ),
        ("approximation.json", "approximation", vec![], "rows: must not be empty"),
        (
            "approximation.json",
            "approximation",
            changed(approximation(), "/error", json!("much")),
            "rows[1].error: invalid type",
        ),
        (
            "approximation.json",
            "approximation",
            changed(approximation(), "/error", json!(-1.0)),
            "rows[1].error: -1 cannot",
        ),
        (
            "denominators.json",
            "denominators",
            changed(denominators(), "/clamped", json!(1.5)),
            "rows[1].clamped: 1.5 cannot",
        ),
        ("cost.json", "cost", changed(cost(), "/kind", json!("sleep")), "rows[1].kind: unknown variant"),
        ("cost.json", "cost", changed(cost(), "/low", json!(0)), "rows[1].low: 0 cannot"),
        (
            "translation.json",
            "translation-cost",
            translation(),
            "translation.json: experiment: must be translation, found translation-cost",
        ),
        (
            "translation.json",
            "translation",
            changed(translation(), "/seeds/0/bleu", json!(340)),
            "rows[1].seeds[0].bleu: 340 cannot",
        ),
        (
            "translation.json",
            "translation",
            changed(translation(), "/mixer", json!("rfa-gate")),
            "rows[1].mixer: rfa-gate appears twice",
        ),
        (
            "translation-cost.json",
            "translation-cost",
            changed(translation_cost(), "/read_ms", json!(-1)),
            "rows[1].read_ms: -1 cannot",
        ),
        (
            "translation-cost.json",
            "translation-cost",
            changed(translation_cost(), "/batch", json!(8)),
            "rows[1].batch: must be 16",
        ),
        (
            "translation-cost.json",
            "translation-cost",
            changed(translation_cost(), "/mixer", json!("rfa-gate")),
            "rows[1].source: rfa-gate at 16 appears twice",
        ),
        ("language-x.json", "language", changed(language(), "/seeds", json!([])), "rows[1].seeds: must not be empty"),
        (
            "language-x.json",
            "language",
            changed(language(), "/mixer", json!("softmax")),
            "rows[1].mixer: softmax appears twice",
        ),
        (
            "language-x.json",
            "language-x",
            changed(language(), "/judged", json!("stream_loss")),
            "rows[1].seeds[0].stream_loss: must be present",
        ),
        (
            "listops.json",
            "listops",
            changed(listops(), "/seeds/0/accuracy", json!(36)),
            "rows[1].seeds[0].accuracy: 36 cannot",
        ),
    ] {
        let message = complaint(name, experiment, &rows);
        assert!(message.contains(part), "{part} is not in: {message}");
    }
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("cost.json"), "{\"experiment\": ").unwrap();
    assert!(report(folder.path()).unwrap_err().to_string().contains("cost.json"));
}
