//! Inspection: totals agree with the config, values with the tensors, and a text changes the gates.

use std::path::Path;

use candle_core::Tensor;
use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
use serde_json::json;
use tidegate_model::checkpoint::{Stored, tensors};
use tidegate_model::random::Normals;
use tidegate_model::{DecoderConfig, Device};
use tidegate_weights::eval::{Checkpoint, evaluate};
use tidegate_weights::inspect::{RepackedType, inspect, observe};

use crate::common::{fixture, weights};

/// Returns a copy of the fixture that a test may change.
fn copy() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(fixture().join(name), folder.path().join(name)).unwrap();
    }
    folder
}

#[test]
fn every_tensor_of_mamba_2_has_a_kind() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures-mamba2");
    let (report, stored) = (inspect(&folder).unwrap(), Stored::open(&folder).unwrap());
    assert_eq!(report.parameters, stored.config().parameters());
    assert_eq!((report.state_bytes, report.heads.len()), (stored.config().state_bytes(), 0));
    let names: Vec<_> = report.groups.iter().map(|group| group.name).collect();
    assert_eq!(names, ["embedding", "output head", "convolutions", "norms", "mixers"]);
}

#[test]
fn totals_are_those_of_the_config() {
    let checkpoint = Checkpoint::load(&fixture(), &Device::Cpu).unwrap();
    let config = checkpoint.decoder.config();
    let report = inspect(&fixture()).unwrap();
    assert_eq!(report.parameters, config.parameters());
    assert_eq!(report.state_bytes, config.state_bytes());
    assert_eq!(report.heads.len(), config.num_hidden_layers * config.num_attention_heads);
    assert!(report.groups.iter().all(|g| g.name != "other"));
    let random = report.groups.iter().find(|g| g.name.starts_with("random")).unwrap();
    assert_eq!(random.numbers as usize, report.heads.len() * config.proj_dim * config.head_dim);
    assert_eq!(random.bytes, 4 * random.numbers);
}

#[test]
fn a_gguf_file_has_the_totals_of_its_folder() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures-rwkv7");
    let (report, want) = (inspect(&folder.join("llamacpp.gguf")).unwrap(), inspect(&folder).unwrap());
    assert_eq!((report.parameters, report.state_bytes), (want.parameters, want.state_bytes));
    assert!(report.parameters > 0 && report.heads == want.heads);
}

#[test]
fn types_that_are_repacked_have_their_error() {
    assert_eq!(inspect(&fixture()).unwrap().repacked, []);
    let folder = copy();
    let floats = folder.path().join("model.safetensors");
    let repacked = ["q_proj", "k_proj", "v_proj"];
    let tensors = candle_core::safetensors::load(&floats, &Device::Cpu).unwrap().into_iter().map(|(name, tensor)| {
        let is_repacked = repacked.iter().any(|part| name.ends_with(&format!("self_attn.{part}.weight")));
        let kind = if is_repacked { GgmlDType::Q5_1 } else { GgmlDType::F32 };
        (name, QTensor::quantize(&tensor, kind).unwrap())
    });
    let tensors: Vec<_> = tensors.collect();
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let mut file = std::fs::File::create(folder.path().join("model.gguf")).unwrap();
    gguf_file::write(&mut file, &[], &tensors).unwrap();
    std::fs::remove_file(floats).unwrap();
    let report = inspect(folder.path()).unwrap();
    let [RepackedType { from, to, tensors: 6, relative_error }] = report.repacked.as_slice() else {
        panic!("{:?}", report.repacked)
    };
    assert_eq!((from.as_str(), to.as_str()), ("q5_1", "q8_0"));
    assert!(*relative_error > 1e-3 && *relative_error < 0.02, "{relative_error}");
    let model = folder.path().display().to_string();
    let table = String::from_utf8(weights(&["inspect", "--model", &model]).stdout).unwrap();
    let row = format!("{:.2} %", 100.0 * relative_error);
    assert!(table.contains("relative error at most") && table.contains("q5_1") && table.contains(&row), "{table}");
}

#[test]
fn heads_are_those_of_the_tensors() {
    let report = inspect(&fixture()).unwrap();
    let stored = Stored::open(&fixture()).unwrap();
    let sigma = stored.floats("model.layers.1.self_attn.sigma").unwrap();
    let bias = stored.floats("model.layers.1.self_attn.gate.bias").unwrap();
    let head = report.heads.iter().find(|h| (h.layer, h.head) == (1, 1)).unwrap();
    let own = &sigma[sigma.len() / 2..];
    let sigma = head.sigma.unwrap();
    assert!(own.contains(&sigma.min) && own.contains(&sigma.max));
    assert!(sigma.min < sigma.mean && sigma.mean < sigma.max);
    // g^half-life = 1/2
    let g = 1.0 / (1.0 + (-f64::from(bias[1])).exp());
    assert!((g.powf(head.half_life.unwrap()) - 0.5).abs() < 1e-9);
    assert_eq!((head.measured_half_life, head.clamped), (None, None));
    assert!(stored.floats("no.such.tensor").unwrap_err().to_string().contains("missing tensor no.such.tensor"));
}

#[test]
fn a_text_moves_the_gates() {
    let mut report = inspect(&fixture()).unwrap();
    let checkpoint = Checkpoint::load(&fixture(), &Device::Cpu).unwrap();
    let path = fixture().join("plain.txt");
    observe(&mut report, &checkpoint, &path, Some(600), &mut |_| ()).unwrap();
    let on_text = report.on_text.as_ref().unwrap();
    assert_eq!((on_text.tokens, on_text.layers.len()), (601, 2));
    for head in &report.heads {
        let (fixed, measured) = (head.half_life.unwrap(), head.measured_half_life.unwrap());
        assert!(measured > 0.0 && (measured / fixed - 1.0).abs() > 1e-6, "{head:?}");
        assert!((0.0..=0.5).contains(&head.clamped.unwrap()), "{head:?}");
    }
    for layer in &on_text.layers {
        let own: Vec<f64> =
            report.heads.iter().filter(|h| h.layer == layer.layer).map(|h| h.clamped.unwrap()).collect();
        assert!((layer.clamped - own.iter().sum::<f64>() / own.len() as f64).abs() < 1e-12);
    }
}

/// Writes a checkpoint of random weights, with the fixture's tokenizer and its config changed by these keys. If `shut`,
/// the gates let nothing in.
fn other(keys: &serde_json::Value, shut: bool) -> tempfile::TempDir {
    let folder = copy();
    let path = folder.path().join("config.json");
    let mut json: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    keys.as_object().unwrap().iter().for_each(|(key, value)| json[key] = value.clone());
    let config = DecoderConfig::from_json(&json.to_string()).unwrap();
    std::fs::write(&path, serde_json::to_string(&config).unwrap()).unwrap();
    let mut normals = Normals::new(5);
    let tensors = tensors(&config).into_iter().map(|(name, shape)| {
        let more = if shut && name.ends_with("gate.bias") { 1e4 } else { 0.5 };
        let numbers = (0..shape.iter().product()).map(|_| 0.3 * normals.normal() as f32 + more).collect();
        (name, Tensor::from_vec(numbers, shape, &Device::Cpu).unwrap())
    });
    candle_core::safetensors::save(&tensors.collect(), folder.path().join("model.safetensors")).unwrap();
    folder
}

#[test]
fn every_kind_of_attention_can_be_inspected() {
    // The kind, and whether its heads have sigma and a gate.
    for (keys, sigma, gate) in [
        (json!({"feature_map": "arc_cosine"}), true, true),
        (json!({"feature_map": "arc_cosine", "gate": false}), true, false),
        (json!({"feature_map": "elu", "proj_dim": 0}), false, true),
        (json!({"feature_map": "elu", "proj_dim": 0, "gate": false}), false, false),
        (json!({"feature_map": "favor"}), false, true),
        (json!({"feature_map": "favor", "gate": false}), false, false),
        (json!({"attention": "hybrid", "sliding_window": 16}), true, true),
        (json!({"attention": "hybrid", "sliding_window": 16, "gate": false}), true, false),
        (json!({"attention": "softmax", "sliding_window": 16}), false, false),
    ] {
        let (folder, name) = (other(&keys, false), keys.to_string());
        let mut report = inspect(folder.path()).unwrap();
        let stored = Stored::open(folder.path()).unwrap();
        assert_eq!(report.parameters, stored.config().parameters(), "{name}");
        assert!(report.groups.iter().all(|g| g.name != "other"), "{name}");
        let heads = if keys["attention"] == "softmax" { 0 } else { 2 * stored.config().num_attention_heads };
        assert_eq!(report.heads.len(), heads, "{name}");
        assert!(report.heads.iter().all(|h| h.sigma.is_some() == sigma && h.half_life.is_some() == gate), "{name}");
        let json = serde_json::to_string(&report).unwrap();
        assert_eq!(json.contains("\"sigma_mean\""), sigma, "{name}");

        let checkpoint = Checkpoint::load(folder.path(), &Device::Cpu).unwrap();
        let path = fixture().join("plain.txt");
        observe(&mut report, &checkpoint, &path, Some(200), &mut |_| ()).unwrap();
        assert_eq!(report.on_text.as_ref().unwrap().tokens, 201, "{name}");
        for head in &report.heads {
            assert_eq!(head.measured_half_life.is_some(), gate, "{name}");
            assert!((0.0..=1.0).contains(&head.clamped.unwrap()), "{name}: {head:?}");
        }
        let scores = evaluate(&checkpoint, &path, Some(200), &mut |_| ()).unwrap();
        assert!(scores.nats.is_finite() && scores.tokens == 200, "{name}");
        assert!(scores.state_bytes >= report.state_bytes, "{name}");
    }
}

#[test]
fn denominators_are_held_where_there_is_nothing_or_less_than_the_floor() {
    // eps = 1: no denominator reaches c, but only gaussian ones are clamped to eps c.
    for (keys, open) in [
        (json!({"denominator_eps": 1.0}), 0.9..=1.0),
        (json!({"denominator_eps": 1.0, "feature_map": "arc_cosine"}), 0.0..=0.5),
        (json!({"denominator_eps": 1.0, "feature_map": "elu", "proj_dim": 0}), 0.0..=0.0),
        (json!({"denominator_eps": 1.0, "feature_map": "favor"}), 0.0..=0.0),
    ] {
        for (shut, expected) in [(false, open), (true, 1.0..=1.0)] {
            let folder = other(&keys, shut);
            let mut report = inspect(folder.path()).unwrap();
            let checkpoint = Checkpoint::load(folder.path(), &Device::Cpu).unwrap();
            observe(&mut report, &checkpoint, &fixture().join("plain.txt"), Some(200), &mut |_| ()).unwrap();
            for head in &report.heads {
                assert!(expected.contains(&head.clamped.unwrap()), "{keys}, shut: {shut}: {head:?}");
            }
        }
    }
}

#[test]
fn the_hybrids_share_counts_only_its_own_denominators() {
    // At this floor every denominator is clamped: random features have length 1, so none is above c.
    for (window, share) in [(16, Some(1.0)), (1000, None)] {
        let folder = other(&json!({"attention": "hybrid", "sliding_window": window, "denominator_eps": 1.0}), false);
        let mut report = inspect(folder.path()).unwrap();
        let checkpoint = Checkpoint::load(folder.path(), &Device::Cpu).unwrap();
        observe(&mut report, &checkpoint, &fixture().join("plain.txt"), Some(200), &mut |_| ()).unwrap();
        assert!(report.heads.iter().all(|head| head.clamped == share), "{:?}", report.heads);
        assert!(report.heads.iter().all(|head| head.measured_half_life.is_some()));
        let layers: Vec<f64> = report.on_text.unwrap().layers.iter().map(|layer| layer.clamped).collect();
        assert_eq!(layers, if share.is_some() { vec![1.0; 2] } else { vec![] });
    }
}

#[test]
fn errors_name_the_broken_file() {
    let folder = copy();
    let weights = folder.path().join("model.safetensors");
    let whole = std::fs::read(&weights).unwrap();
    let error = || inspect(folder.path()).unwrap_err().to_string();
    for broken in [&whole[..whole.len() - 1], &whole[..100], &[0xff; 64]] {
        std::fs::write(&weights, broken).unwrap();
        assert!(error().starts_with("model.safetensors: "), "{}", error());
    }
    std::fs::remove_file(&weights).unwrap();
    assert!(error().contains("model.safetensors: No such file"), "{}", error());

    let config = folder.path().join("config.json");
    std::fs::write(&weights, &whole).unwrap();
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, text.replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3")).unwrap();
    assert!(error().contains("missing tensor model.layers.2.self_attn.sigma"), "{}", error());
}
