//! Small runs of the experiments: the records they write, and that the results agree with theory.

use std::path::Path;
use std::process::{Command, Output};

use candle_core::{DType, Device, Tensor};
use tidegate_experiments::approximation::inputs::{Shape, Source};
use tidegate_experiments::approximation::{Options, Row, measure, steps};
use tidegate_experiments::denominators;
use tidegate_experiments::record::Record;

const SHAPE: Shape = Shape { cases: 2, heads: 2, tokens: 48, d: 16 };

fn weights(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tidegate-experiments")).args(arguments).output().unwrap()
}

fn error(rows: &[Row], estimator: &str, samples: usize) -> f64 {
    rows.iter().find(|row| row.estimator == estimator && row.samples == samples).unwrap().error
}

#[test]
fn errors_fall_with_samples_and_landmarks_help_where_tokens_resemble_their_neighbours() {
    let options = Options { samples: vec![2, 16, 64], seeds: 3 };
    let measured = |source: Source| {
        let mut ticks = 0;
        let rows = measure(source.name(), &source.load(SHAPE).unwrap(), &options, &mut || ticks += 1).unwrap();
        assert_eq!(ticks, steps(&options));
        rows
    };
    let (correlated, independent) = (measured(Source::Correlated), measured(Source::Independent));
    for rows in [&correlated, &independent] {
        for row in rows {
            assert!(row.error_low <= row.error && row.error <= row.error_high && row.error_low > 0.0, "{row:?}");
        }
        assert!(error(rows, "favor", 64) < 0.95 * error(rows, "favor", 2), "{rows:?}");
        // RA is a mean of independent unbiased samples, so its error is proportional to 1 / samples.
        let ratio = error(rows, "ra", 2) / error(rows, "ra", 64);
        assert!((20.0..50.0).contains(&ratio), "2 samples have {ratio} times the error of 64");
        assert!(error(rows, "ra", 16) < error(rows, "lara", 16), "{rows:?}");
        assert!(
            rows.iter().all(|row| !row.estimator.starts_with("lara") || row.samples <= 48),
            "landmarks are tokens'"
        );
    }
    for lara in ["lara", "lara-balance", "lara-means"] {
        assert!(1.2 * error(&correlated, lara, 16) < error(&correlated, "favor", 16), "{lara}: {correlated:?}");
    }
    let again = measured(Source::Correlated);
    assert_eq!(correlated, again, "the same figures from the same seeds");
}

#[test]
fn options_that_ask_for_nothing_are_refused() {
    let inputs = Source::Independent.load(SHAPE).unwrap();
    for options in [
        Options { samples: vec![], seeds: 1 },
        Options { samples: vec![0], seeds: 1 },
        Options { samples: vec![1], seeds: 0 },
    ] {
        let error = measure("independent", &inputs, &options, &mut || {}).unwrap_err().to_string();
        assert_eq!(error, "samples and seeds must be at least 1");
    }
}

fn write_qkv(path: &Path, tokens: usize) {
    let tensor = |seed: f32| {
        let numbers: Vec<f32> = (0..3 * 2 * tokens * 8).map(|i| (seed + i as f32 * 1.7).sin()).collect();
        Tensor::from_vec(numbers, (3, 2, tokens, 8), &Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap()
    };
    let tensors = [("q", tensor(0.1)), ("k", tensor(0.2)), ("v", tensor(0.3))].map(|(name, x)| (name.to_owned(), x));
    candle_core::safetensors::save(&tensors.into(), path).unwrap();
}

#[test]
fn the_command_writes_its_record() {
    let folder = tempfile::tempdir().unwrap();
    let (qkv, out) = (folder.path().join("qkv.safetensors"), folder.path().join("reports"));
    write_qkv(&qkv, 20);
    let (qkv, out_name) = (qkv.display().to_string(), out.display().to_string());
    let arguments =
        ["approximation", "--qkv", &qkv, "--out", &out_name, "--samples", "1,4", "--seeds", "2", "--tokens", "16"];
    let done = weights(&arguments);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let record: Record<Row> = Record::read(&out.join("approximation.json"), "approximation").unwrap();
    assert!(record.command.starts_with("tidegate-experiments approximation --qkv "), "{}", record.command);
    assert!(!record.machine.is_empty());
    assert_eq!(record.settings["model_shape"], serde_json::json!([3, 2, 16, 8]));
    // Three kinds of inputs; nine estimators with two sample counts each, and the mean of V.
    assert_eq!(record.rows.len(), 3 * 19);
    let done = weights(&["approximation", "--qkv", &qkv, "--out", &out_name, "--tokens", "21"]);
    let message = String::from_utf8(done.stderr).unwrap();
    assert!(!done.status.success() && message.contains("q: must have at least 21 tokens, found 20"), "{message}");
}

#[test]
fn a_larger_sigma_clamps_more_and_more_random_vectors_clamp_less() {
    let options = denominators::Options {
        sigmas: vec![1.0, 1.5, 2.0],
        proj_dims: vec![16, 64],
        half_lives: vec![None, Some(64.0)],
        heads: 8,
        tokens: 256,
        ..denominators::Options::default()
    };
    let rows = denominators::count(&options, &mut || {}).unwrap();
    let share = |sigma: f64, dim: usize, half_life: Option<f64>| {
        let same = |row: &&denominators::Row| (row.sigma, row.proj_dim, row.gate_half_life) == (sigma, dim, half_life);
        rows.iter().find(same).unwrap().clamped
    };
    assert_eq!(rows.len(), 12);
    for gate in [None, Some(64.0)] {
        assert!(share(1.0, 64, gate) < 0.005, "{rows:?}");
        assert!(share(1.5, 64, gate) < share(2.0, 64, gate) && share(2.0, 64, gate) > 0.05, "{rows:?}");
        assert!(share(1.5, 64, gate) < share(1.5, 16, gate), "{rows:?}");
    }
    assert!(share(2.0, 64, None) > 0.0 && share(2.0, 64, None) != share(2.0, 64, Some(64.0)), "the gate matters");
}
