//! Targets and results, from the lines that `measure` and `run.sh` have written: a Markdown table, JSON, and the curve
//! against length in the format of `tidegate-experiments cost`.

use std::fmt::Write;
use std::path::Path;

use serde_json::{Value, json};

use super::Result;
use super::aims::{Aim, aims};
use super::lines::{Lines, digits, number, percent, with_ends};

/// A field with its least and greatest value.
fn spread(line: &Value, field: &str) -> String {
    with_ends(number(line, field), number(line, "least"), number(line, "most"))
}

/// A Markdown table.
fn rows(headings: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let mut text = format!("| {} |\n|{}\n", headings.join(" | "), " --- |".repeat(headings.len()));
    let before = text.len();
    for row in rows {
        // Writing to a string does not fail.
        let _ = writeln!(text, "| {} |", row.join(" | "));
    }
    if text.len() == before { String::new() } else { text + "\n" }
}

/// The device and its limits.
fn limits(lines: &Lines) -> String {
    let mut text = String::new();
    for line in lines.of("device").take(1) {
        let _ = writeln!(text, "{}, {} bytes of memory.", line["device"].as_str().unwrap_or("?"), line["memory"]);
    }
    for line in lines.of("copy").take(1) {
        let rate = digits(number(line, "bytes_per_second") / 1e12);
        let _ = writeln!(text, "A copy on it: {rate} TB/s, read and written.");
    }
    for line in lines.of("torch").take(1) {
        let (product, copy) = (number(&line["product"], "median") / 1e12, number(&line["copy"], "median") / 1e12);
        let _ = writeln!(
            text,
            "PyTorch {}: a product of {}^3 in bf16 {} TFLOP/s, a copy {} TB/s.",
            line["torch"].as_str().unwrap_or("?"),
            line["product_side"],
            digits(product),
            digits(copy)
        );
    }
    text + "\n"
}

fn decode(lines: &Lines) -> String {
    let headings = [
        "rows",
        "tokens before",
        "ms a step",
        "of the copy",
        "ms a call, tokens chosen",
        "ms a call, logits on the host",
        "tokens/s of calls",
        "bytes",
    ];
    let row = |line: &Value| {
        let call = number(line, "call_ms");
        vec![
            line["batch"].to_string(),
            line["depth"].to_string(),
            spread(line, "ms"),
            percent(number(line, "share")),
            with_ends(call, number(line, "call_least"), number(line, "call_most")),
            digits(number(line, "logits_ms")),
            digits(number(line, "batch") / call * 1e3),
            line["bytes"].to_string(),
        ]
    };
    rows(&headings, lines.of("decode").map(row))
}

fn kernels(lines: &Lines) -> String {
    let mut text = String::new();
    for whole in lines.of("whole") {
        let of = whole["of"].as_str().unwrap_or("?");
        let kernels: Vec<&Value> = lines.of("kernel").filter(|line| line["of"] == whole["of"]).collect();
        let sum: f64 = kernels.iter().map(|line| number(line, "ms")).sum();
        let (ms, sum) = (spread(whole, "ms"), digits(sum));
        let _ = writeln!(text, "{of}: {ms} ms; its kernels, each alone, {sum} ms together.\n");
        text += &rows(
            &["kernel", "launches", "blocks", "ms of all", "us of one", "of the copy", "TFLOP/s"],
            kernels.iter().map(|line| kernel(line)),
        );
    }
    text
}

fn prompts_and_softmax(lines: &Lines) -> String {
    let row = |line: &Value| {
        let [median, least, most] = ["softmax_ms", "softmax_least", "softmax_most"].map(|field| number(line, field));
        vec![
            line["length"].to_string(),
            spread(line, "ms"),
            digits(number(line, "call_ms")),
            with_ends(median, least, most),
            with_ends(number(line, "ratio"), number(line, "ratio_least"), number(line, "ratio_most")),
            line["backend"].as_str().unwrap_or("?").into(),
        ]
    };
    let headings = ["tokens before", "ms a step", "ms a call", "softmax, ms", "softmax's in ours", "backend"];
    let mut text = rows(&headings, lines.of("beside").map(row));
    for line in lines.of("prefill") {
        let _ = writeln!(text, "A prompt of {} tokens: {} s.\n", line["tokens"], spread(line, "seconds"));
    }
    for line in lines.of("beside prefill") {
        let [own, softmax, ratio] = ["seconds", "softmax_seconds", "ratio"].map(|field| digits(number(line, field)));
        let _ = writeln!(text, "Beside softmax: {own} s and {softmax} s, {ratio} x.\n");
    }
    text
}

fn sessions(lines: &Lines) -> String {
    let headings = [
        "sessions",
        "rows of a step",
        "tokens/s",
        "step p50, ms",
        "p99",
        "between two tokens of a session p50, ms",
        "p99",
        "turns",
        "bytes of state of one",
    ];
    let row = |line: &Value| {
        let step = &line["step_ms"];
        vec![
            line["slots"].to_string(),
            line["batch"].to_string(),
            digits(number(line, "tokens_per_second")),
            digits(number(step, "p50")),
            digits(number(step, "p99")),
            digits(number(&line["gap_ms"], "p50")),
            digits(number(&line["gap_ms"], "p99")),
            line["turns"].to_string(),
            line["state_bytes"].to_string(),
        ]
    };
    rows(&headings, lines.of("sessions").map(row))
}

fn parts(lines: &Lines) -> String {
    let word = |line: &Value, field: &str| line[field].as_str().unwrap_or("").to_owned();
    let mut text = String::new();
    for line in lines.of("failed") {
        let _ = writeln!(text, "Failed: {}: {}\n", word(line, "part"), word(line, "why"));
    }
    let row =
        |line: &Value| vec![word(line, "part"), word(line, "outcome"), line["seconds"].to_string(), word(line, "note")];
    text + &rows(&["part", "outcome", "seconds", "note"], lines.of("part").map(row))
}

/// The targets come last, where a terminal shows them.
fn markdown(lines: &Lines, aims: &[Aim]) -> String {
    let row = |aim: &Aim| vec![aim.name.into(), aim.wanted.clone(), aim.measured.clone(), aim.outcome().into()];
    let aims = rows(&["aim", "wanted", "measured", "outcome"], aims.iter().map(row));
    let own = [limits, decode, kernels, prompts_and_softmax, sessions, parts].map(|section| section(lines));
    format!("# The decoder on CUDA\n\n{}{aims}", own.concat())
}

fn kernel(line: &Value) -> Vec<String> {
    let ms = number(line, "ms");
    let product = match line["product"].as_array().map(Vec::as_slice) {
        Some([rows, ins, outs]) => format!(" ({rows} x {ins} -> {outs})"),
        _ => String::new(),
    };
    let grid = line["grid"].as_array().into_iter().flatten().map(Value::to_string).collect::<Vec<_>>().join(" x ");
    let other = if line["in_cache"] == true { "in its cache" } else { "" };
    let share = line["share"].as_f64().map_or_else(|| other.into(), percent);
    let rate = line["operations_per_second"].as_f64().map_or_else(String::new, |rate| digits(rate / 1e12));
    let name = line["kernel"].as_str().unwrap_or("?");
    let one = ms * 1e3 / number(line, "times");
    vec![format!("{name}{product}"), line["times"].to_string(), grid, spread(line, "ms"), digits(one), share, rate]
}

/// Lines in the format of `tidegate bench --output json`, for both decoders.
fn curve(lines: &Lines, date: Option<&str>) -> String {
    let device = lines.of("device").next().and_then(|line| line["device"].as_str()).unwrap_or("?");
    let mut text = String::new();
    for line in lines.of("beside") {
        let [batch, length] = ["batch", "length"].map(|field| line[field].as_u64().unwrap_or(0));
        let rate = |field: &str| number(line, "batch") / number(line, field) * 1e3;
        let of = |mixer: &str, names: [&str; 3], state: &Value, past: &str| {
            let [median, least, most] = names.map(rate);
            let mut row = json!({"shape": line["shape"], "weights": "bf16", "state": "bf16", "threads": 1, "mixer": mixer,
                "kind": "decode", "batch": batch, "depth": length, "past": past, "tokens": batch,
                "tokens_per_second": median, "least": most, "most": least, "rounds": line["rounds"],
                "state_bytes": state, "command": "model/benches/cuda/run.sh", "machine": device});
            if let Some(date) = date {
                row["date"] = date.into();
            }
            format!("{row}\n")
        };
        text += &of("rfa-gate", ["ms", "least", "most"], &line["state_bytes"], "read");
        text += &of("softmax", ["softmax_ms", "softmax_least", "softmax_most"], &line["cache_bytes"], "drawn");
    }
    text
}

/// Writes `table.md`, `results.json` and `curve.jsonl` into a folder, and the table to the terminal.
pub(super) fn table(file: &Path, folder: &Path, date: Option<&str>) -> Result<()> {
    let lines = Lines::read(file)?;
    let aims = aims(&lines);
    let text = markdown(&lines, &aims);
    std::fs::create_dir_all(folder)?;
    std::fs::write(folder.join("table.md"), &text)?;
    std::fs::write(folder.join("curve.jsonl"), curve(&lines, date))?;
    let own = |aim: &Aim| json!({"aim": aim.name, "wanted": aim.wanted, "measured": aim.measured, "met": aim.met});
    let all = json!({"date": date, "aims": aims.iter().map(own).collect::<Vec<_>>(), "lines": lines.0});
    std::fs::write(folder.join("results.json"), serde_json::to_string_pretty(&all)? + "\n")?;
    println!("{text}");
    Ok(())
}
