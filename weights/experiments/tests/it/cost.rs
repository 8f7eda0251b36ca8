//! Gathering the output of `tidegate bench`: the rows, the command that measures them again, and errors.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use tidegate_experiments::bench::BenchError;
use tidegate_experiments::cost::{Row, gather};
use tidegate_experiments::record::Record;
use tidegate_experiments::report::report;

/// Returns a line as `tidegate bench` writes it.
fn line(mixer: &str, kind: &str, batch: u64, depth: u64) -> Value {
    let (rate, past) = if mixer == "softmax" { (4e5 / (100.0 + depth as f64), "drawn") } else { (3500.5, "read") };
    let tokens = if kind == "decode" { 20 * batch } else { 512 };
    json!({
        "shape": "12m", "parameters": 13_019_928, "weights": "bf16", "mixer": mixer, "state": "f32", "threads": 2,
        "batch": batch, "depth": depth, "past": past, "kind": kind, "tokens": tokens, "tokens_per_second": rate,
        "least": 0.8 * rate, "most": 1.1 * rate, "rounds": 9, "state_bytes": if mixer == "softmax" { 107_000_000 } else { 798_816 }, "weight_bytes": 26_460_256,
        "roof_share": 2.1, "read_bandwidth": 46e9, "fma_peak": 359e9,
    })
}

fn lines(mixer: &str) -> Vec<Value> {
    let kinds = [("decode", 1), ("decode", 16), ("prefill", 1)];
    kinds.iter().flat_map(|&(kind, batch)| [0, 512, 8192].map(|depth| line(mixer, kind, batch, depth))).collect()
}

fn write(folder: &Path, name: &str, lines: &[Value]) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, lines.iter().map(Value::to_string).collect::<Vec<_>>().join("\n")).unwrap();
    path
}

fn gathered(files: &[PathBuf]) -> Result<Record<Row>, BenchError> {
    gather(files, "tidegate-experiments cost", |path| path.file_name().unwrap().to_str().unwrap().to_owned())
}

#[test]
fn one_file_or_one_for_each_mixer_give_the_same_rows() {
    let folder = tempfile::tempdir().unwrap();
    let (rfa, softmax) = (lines("rfa-gate"), lines("softmax"));
    let both = write(folder.path(), "both.jsonl", &[&rfa[..], &softmax].concat());
    let apart = [write(folder.path(), "rfa.jsonl", &rfa), write(folder.path(), "softmax.jsonl", &softmax)];
    let (one, two) = (gathered(&[both]).unwrap(), gathered(&apart).unwrap());
    assert_eq!(one.rows, two.rows);
    assert_eq!(one.rows.len(), 18);
    let json = serde_json::to_value(&one.rows[4]).unwrap();
    assert_eq!(
        json,
        json!({"mixer": "rfa-gate", "kind": "decode", "batch": 16, "depth": 512, "tokens_per_second": 3500.5,
               "low": 2800.4, "high": 0.1 * 11.0 * 3500.5, "state_bytes": 798_816})
    );
    assert_eq!(
        one.command,
        "tidegate bench --shape 12m --weights bf16 --mixer rfa-gate,softmax --threads 2 --state f32 --depths 0,512,8192 \
         --batch 1,16 --prompt 512 --steps 20 --rounds 9 --output json > both.jsonl && tidegate-experiments cost"
    );
    assert!(two.command.contains("--mixer softmax ") && two.command.contains("> rfa.jsonl && tidegate bench"));
    let said = |key: &str| one.settings[key].clone();
    assert_eq!((said("weights"), said("steps"), said("rounds")), (json!("bf16"), json!(20), json!(9)));
    assert!(said("past").as_str().unwrap().contains("softmax"));
    assert_eq!(one.date.len(), 10);
    assert!(said("origin").as_str().unwrap().contains("reconstructed"));
}

#[test]
fn commands_are_taken_from_the_lines_and_not_invented() {
    let folder = tempfile::tempdir().unwrap();
    let mut lines = lines("rfa-gate");
    lines.pop();
    assert_eq!(gathered(&[write(folder.path(), "part", &lines)]).unwrap().command, "tidegate-experiments cost");
    for line in &mut lines {
        line["command"] = "measure".into();
        line["machine"] = "a machine".into();
        line["date"] = "2026-01-02".into();
    }
    let record = gathered(&[write(folder.path(), "said", &lines)]).unwrap();
    assert_eq!(record.command, "measure > said && tidegate-experiments cost");
    assert_eq!((record.machine.as_str(), record.date.as_str()), ("a machine", "2026-01-02"));
    assert!(!record.settings.contains_key("origin"));
}

#[test]
fn errors_name_the_file_and_line_that_bench_did_not_write() {
    let folder = tempfile::tempdir().unwrap();
    let complaint = |second: &Value| {
        let first = line("rfa-gate", "decode", 1, 0);
        let path = write(folder.path(), "x.jsonl", &[first, second.clone()]);
        gathered(&[path]).unwrap_err().to_string()
    };
    let changed = |key: &str, value: Value| {
        let mut line = line("rfa-gate", "decode", 1, 512);
        line[key] = value;
        complaint(&line)
    };
    for (message, part) in [
        (changed("depth", json!("deep")), "x.jsonl:2: depth: invalid type"),
        (changed("kind", json!("sleep")), "x.jsonl:2: kind: unknown variant"),
        (changed("least", json!(0)), "x.jsonl:2: least, tokens_per_second and most must rise from above 0, found 0,"),
        (changed("most", json!(1)), "must rise"),
        (changed("tokens", json!(0)), "x.jsonl:2: tokens must be steps of batch rows"),
        (changed("threads", json!(1)), "x.jsonl:2: threads must be 2, as in the first line of all, found 1"),
        (changed("weights", json!("q8_0")), "weights must be bf16"),
        (changed("depth", json!(0)), "rfa-gate with batch 1 at depth 0 appears twice"),
        (complaint(&json!({"mixer": "rfa"})), "x.jsonl:2: no line of tidegate bench --output json: missing field"),
        (complaint(&json!("| mixer | weights |")), "x.jsonl:2: no line of tidegate bench"),
    ] {
        assert!(message.contains(part), "{part} is not in: {message}");
    }
    let empty = write(folder.path(), "empty", &[]);
    assert!(gathered(&[empty]).unwrap_err().to_string().contains("empty: holds no line"));
    assert!(gathered(&[folder.path().join("none")]).unwrap_err().to_string().contains("none: No such file"));
}

#[test]
fn the_record_appears_in_the_report_without_absolute_paths() {
    let folder = tempfile::tempdir().unwrap();
    let lines = [lines("rfa-gate"), lines("softmax")].concat();
    let (path, out) = (write(folder.path(), "bench.jsonl", &lines), folder.path().join("reports"));
    let done = Command::new(env!("CARGO_BIN_EXE_tidegate-experiments"))
        .arg("cost")
        .arg(&path)
        .arg(format!("--out={}", out.display()))
        .current_dir(folder.path())
        .output()
        .unwrap();
    assert!(done.status.success(), "{done:?}");
    let text = std::fs::read_to_string(out.join("cost.json")).unwrap();
    assert!(text.contains("> bench.jsonl && tidegate-experiments cost bench.jsonl --out=reports\""), "{text}");
    assert!(!text.contains(&folder.path().display().to_string()), "{text}");
    report(&out).unwrap();
    let text = std::fs::read_to_string(out.join("REPORT.md")).unwrap();
    // RFA takes 1 / 3.5005 ms a token; softmax takes 100 / 400 ms at depth 0 and 8,292 / 400 ms at depth 8,192.
    for part in ["| rfa-gate | 0.286 (0.875 x) |", "0.286 (72.6 x) | 798,816 |", "In parentheses: tokens per second"] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let svg = std::fs::read_to_string(out.join("cost.svg")).unwrap();
    assert!(svg.contains(">bytes of state; softmax reserves room for the longest text of the run<"), "{svg}");
    // For inspection, a folder named by TIDEGATE_PICTURES gets a copy.
    if let Ok(kept) = std::env::var("TIDEGATE_PICTURES") {
        std::fs::copy(out.join("cost.svg"), Path::new(&kept).join("cost-of-bench.svg")).unwrap();
    }
}
