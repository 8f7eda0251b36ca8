//! Plots of what the server's benchmarks write.

use std::path::PathBuf;

use serde_json::{Value, json};
use tidegate_experiments::plot::{throughput, turns};

fn line(weights: &str, threads: u64, kind: &str, batch: u64, depth: u64) -> Value {
    let rate = (threads * batch) as f64 * 100.0;
    json!({
        "shape": "a <shape> & more", "weights": weights, "mixer": "rfa-gate", "state": "f32", "device": "cpu", "threads": threads,
        "batch": batch, "depth": depth, "past": "read", "kind": kind, "tokens": 512 * batch, "tokens_per_second": rate,
        "least": 0.9 * rate, "most": 1.1 * rate, "rounds": 3, "state_bytes": 1,
    })
}

fn file(folder: &tempfile::TempDir, lines: &[Value]) -> PathBuf {
    let path = folder.path().join("lines.jsonl");
    std::fs::write(&path, lines.iter().map(Value::to_string).collect::<Vec<_>>().join("\n")).unwrap();
    path
}

fn drawn(lines: &[Value]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let svg = throughput(&[file(&folder, lines)]).unwrap();
    assert!(
        svg.starts_with("<svg ") && svg.ends_with("</svg>\n") && !svg.contains("NaN") && !svg.contains("inf"),
        "{svg}"
    );
    svg
}

#[test]
fn depths_batches_and_prompts_each_have_a_panel() {
    let decode = |batch, depth| line("bf16", 1, "decode", batch, depth);
    let one = drawn(&[decode(1, 0)]);
    assert!(one.contains(">decoding, one row<") && !one.contains("several rows"), "{one}");
    assert!(
        one.contains("a &lt;shape&gt; &amp; more, rfa-gate, bf16 weights, f32 state, 1 thread, medians of 3"),
        "{one}"
    );
    let batches = drawn(&[decode(1, 2048), decode(8, 2048)]);
    assert!(batches.contains("several rows at once, all together, at depth 2,048<") && !batches.contains("one row"));
    let all = drawn(&[decode(8, 0), decode(8, 9), decode(16, 0), decode(16, 9), line("bf16", 1, "prefill", 1, 0)]);
    for title in ["decoding, 8 rows at once<", "at depth 0<", "reading a prompt of 512 tokens<"] {
        assert!(all.contains(title), "{title} is not in {all}");
    }
}

#[test]
fn each_model_and_number_of_threads_has_a_line_labelled_by_what_varies() {
    let cases = [("bf16", 1), ("bf16", 2), ("q8_0", 1), ("q8_0", 2)];
    let lines = cases.map(|(weights, threads)| [512, 0].map(|depth| line(weights, threads, "decode", 1, depth)));
    let svg = drawn(lines.as_flattened());
    for label in ["bf16, 1 thread<", "bf16, 2 threads<", "q8_0, 1 thread<", "q8_0, 2 threads<"] {
        assert_eq!(svg.matches(&format!("</tspan> {label}")).count(), 1, "{label}: {svg}");
    }
}

#[test]
fn turns_are_drawn_and_malformed_ones_named() {
    let folder = tempfile::tempdir().unwrap();
    let turn =
        |tokens: u64, again: f64| json!({"tokens": tokens, "memory": [4.0, 3.0, 9.0], "disk": [5.0], "again": [again]});
    let svg = turns(&file(&folder, &[turn(1000, 200.0), turn(8000, 1600.0)])).unwrap();
    for label in [
        "1,600</tspan> ms, history sent again<",
        "5.00</tspan> ms, session from disk<",
        "4.00</tspan> ms, session from",
    ] {
        assert!(svg.contains(label), "{label} is not in {svg}");
    }
    let error = turns(&file(&folder, &[turn(1000, 200.0), turn(8000, 0.0)])).unwrap_err().to_string();
    assert!(error.contains("lines.jsonl:2: memory, disk and again must hold times above 0"), "{error}");
}
