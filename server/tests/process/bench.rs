//! `tidegate bench` as a process: its output and its errors.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// Flags of the briefest possible measurement.
const BRIEF: [&str; 6] = ["--device", "cpu", "--steps", "2", "--rounds", "1"];

/// Runs the briefest possible measurement of the shipped checkpoint, or of what `args` name.
fn bench(args: &[&str]) -> Output {
    run(&[&BRIEF[..], args].concat())
}

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["bench", "--threads", "1"])
        .args(args)
        .current_dir(std::env::temp_dir())
        .env_remove("TIDEGATE_MODEL")
        .output()
        .unwrap()
}

fn printed(args: &[&str]) -> String {
    output(args, bench(args))
}

fn output(args: &[&str], output: Output) -> String {
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{args:?}: {error}");
    assert_eq!(error, "", "progress is printed only on terminals");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn json_contains_every_case_with_its_share_of_the_roofline() {
    let text = printed(&["--depths", "64,0", "--batch", "1,3", "--prompt", "16", "--output", "json"]);
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let cases: Vec<(&str, u64, u64)> = lines
        .iter()
        .map(|line| {
            let number = |key: &str| line[key].as_u64().unwrap();
            (line["kind"].as_str().unwrap(), number("batch"), number("depth"))
        })
        .collect();
    let decode = |batch, depth| ("decode", batch, depth);
    let prefill = |depth| ("prefill", 1, depth);
    assert_eq!(cases, [decode(1, 0), decode(1, 64), decode(3, 0), decode(3, 64), prefill(0), prefill(64)]);
    for line in &lines {
        assert_eq!((&line["shape"], &line["mixer"]), (&"tidegate-tiny".into(), &"rfa-gate".into()), "{line}");
        assert_eq!((&line["weights"], &line["state"]), (&"bf16".into(), &"f32".into()), "{line}");
        assert_eq!((&line["threads"], &line["rounds"]), (&1.into(), &1.into()), "{line}");
        assert_eq!(line["device"], "cpu", "{line}");
        let tokens = if line["kind"] == "prefill" { 16 } else { 2 * line["batch"].as_u64().unwrap() };
        assert_eq!(line["tokens"], tokens, "{line}");
        let number = |key: &str| line[key].as_f64().unwrap_or_else(|| panic!("no number {key} in {line}"));
        assert!(number("least") <= number("tokens_per_second") && number("tokens_per_second") <= number("most"));
        // Six layers of four heads: S (128, 64), z (128), c.
        assert_eq!(number("state_bytes"), f64::from(6 * 4 * (128 * 65 + 1) * 4), "{line}");
        assert!(number("weight_bytes") > 2.0 * 3e6 && number("parameters") > 3e6, "{line}");
        assert!(number("read_bandwidth") > 1e8 && number("fma_peak") > 1e8, "{line}");
        let seconds = if line["kind"] == "decode" {
            let rows = number("batch");
            (number("weight_bytes") + 2.0 * rows * number("state_bytes")) / rows / number("read_bandwidth")
        } else {
            // Each token goes through the matrices of six layers, and one of the sixteen through the output head.
            let layer = 256.0 * (4.0 * 256.0 + 4.0 + 3.0 * 704.0);
            2.0 * (6.0 * layer + 4096.0 * 256.0 / 16.0) / number("fma_peak")
        };
        let share = seconds * number("tokens_per_second");
        assert!((number("roof_share") / share - 1.0).abs() < 1e-6, "{line}: expected a share of {share}");
    }
}

#[test]
fn the_table_has_a_row_per_weight_type() {
    let list = ["--weights", "f32,q8_0", "--depths", "0,16", "--batch", "1", "--prompt", "16"];
    let table = printed(&list);
    assert!(table.starts_with("tidegate-tiny: ") && table.contains("1 thread of this machine: "), "{table}");
    assert!(table.contains("rfa-gate with f32 weights: "), "{table}");
    for row in ["| rfa-gate | f32 | 1 | decode | 1 | 16 | ", "| rfa-gate | q8_0 | 1 | prefill | 1 | 0 | "] {
        assert_eq!(table.matches(row).count(), 1, "{row} in {table}");
    }
}

#[test]
fn a_shape_has_random_weights() {
    let list = ["--shape", "12m", "--depths", "0", "--batch", "1", "--prompt", "0", "--state", "bf16"];
    let text = printed(&[&list[..], &["--output", "json"]].concat());
    let line: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&line["shape"], &line["weights"], &line["state"]), (&"12m".into(), &"bf16".into(), &"bf16".into()));
    let (parameters, bytes) = (line["parameters"].as_f64().unwrap(), line["weight_bytes"].as_f64().unwrap());
    // Large matrices in bf16 are packed into 12 bits per weight where the machine has a kernel for it.
    assert!((12e6..14e6).contains(&parameters) && (1.5..2.1).contains(&(bytes / parameters)), "{line}");
}

#[test]
fn softmax_attends_to_a_random_past() {
    let list = ["--shape", "12m", "--mixer", "softmax,rfa-gate", "--depths", "0,600", "--batch", "2", "--prompt", "16"];
    let text = printed(&[&list[..], &["--output", "json"]].concat());
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 8);
    for line in &lines[..4] {
        assert_eq!((&line["mixer"], &line["past"]), (&"softmax".into(), &"drawn".into()), "{line}");
        // Six layers of four heads: keys and values of a window of 768 tokens.
        assert_eq!(line["state_bytes"], 6 * 4 * 2 * 768 * 64 * 4, "{line}");
    }
    assert!(lines[4..].iter().all(|line| (&line["mixer"], &line["past"]) == (&"rfa-gate".into(), &"read".into())));
    let line = lines.iter().find(|line| line["kind"] == "decode" && line["depth"] == 600).unwrap();
    let number = |key: &str| line[key].as_f64().unwrap();
    let bytes = number("weight_bytes") + 2.0 * number("state_bytes") * 602.0 / 768.0;
    let share = bytes / 2.0 / number("read_bandwidth") * number("tokens_per_second");
    assert!((number("roof_share") / share - 1.0).abs() < 1e-6, "{line}: expected a share of {share}");
    let table = printed(&list);
    assert!(table.contains("The keys and values of softmax's past are random numbers."), "{table}");
}

#[test]
fn drafts_are_measured_with_the_texts_that_they_save_time_for() {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("weights/checkpoints/tidegate-tiny");
    let list = ["--device", "cpu", "--draft", "--prompt", "300", "--steps", "40", "--rounds", "2"];
    let with = [&list[..], &["--draft-model", shipped.to_str().unwrap(), "--output", "json"]].concat();
    let text = output(&with, run(&with));
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(lines.iter().map(|line| &line["text"]).eq(["code", "table", "prose"]), "{text}");
    for line in &lines {
        assert_eq!((&line["draft_model"], &line["weights"]), (&"tidegate-tiny".into(), &"bf16".into()), "{line}");
        assert_eq!((&line["tokens"], &line["rounds"], &line["threads"]), (&39.into(), &2.into(), &1.into()), "{line}");
        let number = |of: &str, key: &str| line[of][key].as_f64().unwrap_or_else(|| panic!("no {of}.{key} in {line}"));
        let ratio = number("with", "median") / number("without", "median");
        assert!((line["ratio"].as_f64().unwrap() / ratio - 1.0).abs() < 1e-9, "{line}");
        assert!(number("without", "least") <= number("without", "most"), "{line}");
        assert!(line["accepted"].as_u64() <= line["drafted"].as_u64(), "{line}");
        assert!(line["text"] != "table" || line["drafted"].as_u64() > Some(0), "{line}");
    }
    let shape = [&list[..], &["--shape", "12m", "--weights", "bf16,q8_0"]].concat();
    let table = output(&shape, run(&shape));
    for row in ["| bf16 | code | ", "| q8_0 | table | "] {
        assert_eq!(table.matches(row).count(), 1, "{row} in {table}");
    }
    assert!(!table.contains("prose"), "random weights write none: {table}");
}

#[test]
fn a_folder_from_the_environment_is_measured_and_errors_are_reported() {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("weights/checkpoints/tidegate-tiny");
    let folder = shipped.to_str().unwrap();
    for (args, words) in [
        (&["--model", "/nowhere"][..], "error: /nowhere: there is no such file or folder"),
        (&["--model", folder, "--shape", "12m"], "cannot be used with"),
        (&["--model", folder, "--mixer", "softmax"], "--mixer softmax: "),
        (&["--shape", "12m", "--mixer", "softmax", "--batch", "1000000"], "error: --mixer softmax: 1,000,000 rows of "),
        (&["--shape", "12m", "--mixer", "softmax", "--depths", "99999999"], "sliding_window must be between 1 and "),
        (&["--weights", "q5_1"], "must be one of f32, bf16, f16, q8_0, q4_0, q4_k"),
        (&["--shape", "12m", "--batch", "1000000000000"], "error: the states cannot be allocated: "),
        (&["--shape", "12m", "--batch", "100000000000000"], "error: the states cannot be allocated: "),
        (&["--draft-model", folder], "--draft"),
        (&["--draft", "--batch", "8"], "cannot be used with"),
        (&["--draft", "--backend", "candle"], "--draft: models read drafts on the CPU alone"),
        (&["--draft", "--threads", "2"], "--threads"),
        (&["--draft", "--prompt", "0"], "--prompt at least 1"),
        (&["--draft", "--prompt", "100000"], "--prompt and --steps: the given text has "),
        (&["--draft", "--shape", "12m", "--mixer", "softmax"], "cannot be used with"),
    ] {
        let output = bench(args);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && error.contains(words), "{args:?}: {error}");
        assert!(output.stdout.is_empty(), "{args:?}");
    }
    let named = |folder: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.args(["bench", "--depths", "0", "--batch", "1", "--prompt", "0", "--steps", "1", "--rounds", "1"]);
        command.env("TIDEGATE_MODEL", folder).env("TIDEGATE_THREADS", "1").output().unwrap()
    };
    assert!(named(folder).status.success());
    assert!(
        String::from_utf8(named("/nowhere").stderr)
            .unwrap()
            .contains("error: /nowhere: there is no such file or folder")
    );
}
