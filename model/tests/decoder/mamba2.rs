//! Compares Mamba-2 with the reference in f64 and with Hugging Face's `transformers`, and tests the tensors of its
//! checkpoints.
//!
//! `tests/fixtures-mamba2` is written by `weights/training/tidegate_training/mamba2_fixture.py`.

use std::path::Path;

use tidegate_model::checkpoint::{self, LoadError};
use tidegate_model::mixers::mamba2::naive::{LayerMemory, Model};
use tidegate_model::{Decoder, Device, StatePool, WeightType};

use crate::common::{Numbers, bits, config, distance, flat, row, write_checkpoint};
use crate::reference::{close, fixture, golden, layer, narrow, wide};
use crate::table::MIXERS;

const FIXTURE: &str = "fixtures-mamba2";

fn reference(folder: &Path) -> Model {
    let (config, tensors) = wide(folder, "backbone.embeddings.weight");
    Model { config, tensors }
}

fn compare(pool: &StatePool, slot: usize, memory: &[LayerMemory], what: &str) {
    for (i, memory) in memory.iter().enumerate() {
        let (s, inputs) = layer(pool, i, slot);
        close(&s, &narrow(&memory.s), &format!("{what}: S of layer {i}"));
        close(&inputs, &narrow(&memory.inputs), &format!("{what}: inputs of layer {i}"));
    }
}

/// Copies the fixture's checkpoint, with this number of groups in the gated norm.
fn with_norm_groups(groups: usize) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(fixture(FIXTURE).join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    let text = std::fs::read_to_string(fixture(FIXTURE).join("config.json")).unwrap();
    let text = text.replacen('{', &format!("{{\"norm_groups\": {groups}, "), 1);
    std::fs::write(folder.path().join("config.json"), text).unwrap();
    folder
}

/// `transformers` normalizes the channels of each group separately; its older versions normalize all channels together.
/// The fixture has both.
#[test]
fn logits_and_states_agree_with_transformers() {
    let (golden, ids) = golden(FIXTURE);
    for (norm, groups) in [("whole", 1), ("groups", 2)] {
        let folder = with_norm_groups(groups);
        let decoder = checkpoint::load(folder.path(), &Device::Cpu).unwrap();
        let (vocab, layers) = (decoder.config().vocab_size, decoder.config().num_hidden_layers);
        let mut pool = decoder.new_pool(2).unwrap();
        // Slot 0 reads the tokens at once, slot 1 one by one.
        let mut read = 0;
        for after in [1, 10, 1000] {
            let what = |part: &str| format!("{part} after {after} tokens, {norm}");
            let want = flat(&golden[&format!("{norm}.{after}.logits")]);
            assert!(want.iter().any(|v| v.abs() > 0.5), "the golden logits are nearly constant");
            let logits = decoder.prefill_logits(&ids[read..after], &mut pool, 0).unwrap();
            close(&logits, &want, &what("logits"));
            let steps: Vec<f32> =
                ids[read..after].iter().flat_map(|&id| decoder.decode(&[id], &mut pool, &[1]).unwrap()).collect();
            assert_eq!(bits(&steps[steps.len() - vocab..]), bits(&logits), "{after} tokens, {norm}");
            read = after;
            for i in 0..layers {
                let (s, inputs) = layer(&pool, i, 0);
                close(&s, &flat(&golden[&format!("{norm}.{after}.{i}.s")]), &what("S"));
                close(&inputs, &flat(&golden[&format!("{norm}.{after}.{i}.inputs")]), &what("inputs"));
            }
        }
        let (model, mut memory) = (reference(folder.path()), reference(folder.path()).new_memory());
        for (after, &id) in (1..=10).zip(&ids) {
            let logits = model.step(id, &mut memory);
            if let Some(want) = golden.get(&format!("{norm}.{after}.logits")) {
                close(&narrow(&logits), &flat(want), &format!("the reference's logits after {after} tokens, {norm}"));
            }
        }
    }
}

#[test]
fn every_shape_agrees_with_the_reference() {
    for (seed, keys) in (31..).zip(MIXERS[4].configs) {
        let folder = tempfile::tempdir().unwrap();
        write_checkpoint(folder.path(), &config(keys), seed);
        let (model, decoder) = (reference(folder.path()), checkpoint::load(folder.path(), &Device::Cpu).unwrap());
        let ids = Numbers::new(seed).ids(120, 61);
        let mut pool = decoder.new_pool(1).unwrap();
        let logits = flat(&decoder.forward(&row(&ids), &mut pool, &[0]).unwrap());
        let mut memory = model.new_memory();
        for (&id, logits) in ids.iter().zip(logits.chunks_exact(61)) {
            close(logits, &narrow(&model.step(id, &mut memory)), keys);
        }
        compare(&pool, 0, &memory, keys);
    }
}

#[test]
fn a_checkpoint_has_the_tensors_of_the_published_layout() {
    let tensors = checkpoint::tensors(&config(MIXERS[4].configs[1]));
    for (name, shape) in [
        ("backbone.embeddings.weight", Some(&[61, 24][..])),
        ("backbone.norm_f.weight", Some(&[24])),
        ("lm_head.weight", Some(&[61, 24])),
        ("backbone.layers.0.norm.weight", Some(&[24])),
        ("backbone.layers.1.mixer.in_proj.weight", Some(&[32 + 96 + 2, 24])),
        ("backbone.layers.1.mixer.in_proj.bias", Some(&[32 + 96 + 2])),
        ("backbone.layers.1.mixer.conv1d.weight", Some(&[96, 1, 3])),
        ("backbone.layers.1.mixer.conv1d.bias", Some(&[96])),
        ("backbone.layers.1.mixer.dt_bias", Some(&[2])),
        ("backbone.layers.1.mixer.A_log", Some(&[2])),
        ("backbone.layers.1.mixer.D", Some(&[2])),
        ("backbone.layers.1.mixer.norm.weight", Some(&[32])),
        ("backbone.layers.1.mixer.out_proj.weight", Some(&[24, 32])),
        ("backbone.layers.2.norm.weight", None),
    ] {
        assert_eq!(tensors.get(name).map(|shape| &**shape), shape, "{name}");
    }
    assert!(!checkpoint::tensors(&config(MIXERS[4].configs[0])).contains_key("lm_head.weight"), "it is tied");
}

/// The package `mamba_ssm` calls the embedding `embedding`, and also stores the tied output head.
#[test]
fn the_names_of_the_package_are_read() {
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path(), &config(MIXERS[4].configs[0]), 1);
    let ids = Numbers::new(2).ids(20, 61);
    let logits = || {
        let decoder = checkpoint::load(folder.path(), &Device::Cpu)?;
        Ok::<_, LoadError>(decoder.prefill_logits(&ids, &mut decoder.new_pool(1).unwrap(), 0).unwrap())
    };
    let want = logits().unwrap();
    let file = folder.path().join("model.safetensors");
    let mut tensors = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
    let embedding = tensors.remove("backbone.embeddings.weight").unwrap();
    tensors.insert("lm_head.weight".into(), embedding.clone());
    tensors.insert("backbone.embedding.weight".into(), embedding);
    candle_core::safetensors::save(&tensors, &file).unwrap();
    assert_eq!(bits(&logits().unwrap()), bits(&want));
    tensors.remove("backbone.embedding.weight");
    candle_core::safetensors::save(&tensors, &file).unwrap();
    let error = logits().unwrap_err();
    let LoadError::Tensors { problems, .. } = &error else { panic!("{error}") };
    assert_eq!(problems, &["missing tensor backbone.embeddings.weight"]);
}

#[test]
fn quantised_weights_give_nearly_the_same_logits() {
    let keys = MIXERS[4].configs[3];
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path(), &config(keys), 9);
    let ids = Numbers::new(10).ids(40, 61);
    let logits = |decoder: &Decoder| decoder.prefill_logits(&ids, &mut decoder.new_pool(1).unwrap(), 0).unwrap();
    let full = logits(&checkpoint::load(folder.path(), &Device::Cpu).unwrap());
    for (kind, bound) in [(WeightType::Bf16, 0.1), (WeightType::Q8_0, 0.2)] {
        let error = distance(&full, &logits(&checkpoint::load_as(folder.path(), kind).unwrap()));
        assert!(error > 0.0 && error < bound, "{kind}: {error}");
    }
}

#[test]
fn random_weights_give_logits_that_vary() {
    let decoder = Decoder::random(config(MIXERS[4].configs[3]), WeightType::Q8_0, 1).unwrap();
    let ids = Numbers::new(1).ids(100, 61);
    let logits = decoder.prefill_logits(&ids, &mut decoder.new_pool(1).unwrap(), 0).unwrap();
    assert!(logits.iter().all(|v| v.is_finite()) && logits.iter().any(|v| v.abs() > 0.1));
}
