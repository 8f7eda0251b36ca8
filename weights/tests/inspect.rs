//! Inspection: totals agree with the config, values with the tensors, and a text moves the gates.

use std::path::{Path, PathBuf};

use tidegate_model::Device;
use tidegate_model::checkpoint::Stored;
use tidegate_weights::eval::Checkpoint;
use tidegate_weights::inspect::{inspect, observe};

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny")
}

/// A copy of the fixture that a test may spoil.
fn copy() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(fixture().join(name), folder.path().join(name)).unwrap();
    }
    folder
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
fn heads_are_those_of_the_tensors() {
    let report = inspect(&fixture()).unwrap();
    let stored = Stored::open(&fixture()).unwrap();
    let sigma = stored.floats("model.layers.1.self_attn.sigma").unwrap();
    let bias = stored.floats("model.layers.1.self_attn.gate.bias").unwrap();
    let head = report.heads.iter().find(|h| (h.layer, h.head) == (1, 1)).unwrap();
    let own = &sigma[sigma.len() / 2..];
    assert!(own.contains(&head.sigma_min) && own.contains(&head.sigma_max));
    assert!(head.sigma_min < head.sigma_mean && head.sigma_mean < head.sigma_max);
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

#[test]
fn a_spoilt_folder_is_named() {
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
