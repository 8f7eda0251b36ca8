//! Compares RWKV-7 with PyPI's `rwkv` and with the reference in f64, and tests the tensors of its checkpoints.
//!
//! `tests/fixtures-rwkv7` is written by `weights/training/tidegate_training/rwkv7_fixture.py`.

use std::path::Path;

use tidegate_model::checkpoint::{self, LoadError, Stored};
use tidegate_model::mixers::rwkv7::naive::{LayerMemory, Model};
use tidegate_model::probe::Probe;
use tidegate_model::{Decoder, DecoderConfig, Device, StatePool, Tensor, WeightType};

use crate::common::{Numbers, bits, config, distance, flat, row, write_checkpoint};
use crate::reference::{close, fixture, golden, layer, narrow, wide};
use crate::table::MIXERS;

const FIXTURE: &str = "fixtures-rwkv7";

fn reference(folder: &Path) -> Model {
    let (config, tensors) = wide(folder, "model.embeddings.weight");
    Model { config, tensors }
}

fn compare(pool: &StatePool, slot: usize, memory: &[LayerMemory], what: &str) {
    for (i, memory) in memory.iter().enumerate() {
        let (s, inputs) = layer(pool, i, slot);
        close(&s, &narrow(&memory.s), &format!("{what}: S of layer {i}"));
        let want = [&*memory.time_input, &memory.channel_input].concat();
        close(&inputs, &narrow(&want), &format!("{what}: inputs of layer {i}"));
    }
}

#[test]
fn logits_and_states_agree_with_the_package_rwkv() {
    let decoder = checkpoint::load(&fixture(FIXTURE), &Device::Cpu).unwrap();
    let (golden, ids) = golden(FIXTURE);
    let vocab = decoder.config().vocab_size;
    let mut pool = decoder.new_pool(2).unwrap();
    // Slot 0 reads the tokens at once, slot 1 one by one.
    let mut read = 0;
    for after in [1, 10, 1000] {
        let want = flat(&golden[&format!("{after}.logits")]);
        assert!(want.iter().any(|v| v.abs() > 0.5), "the golden logits are nearly constant");
        let logits = decoder.prefill_logits(&ids[read..after], &mut pool, 0).unwrap();
        close(&logits, &want, &format!("logits after {after} tokens"));
        let steps: Vec<f32> =
            ids[read..after].iter().flat_map(|&id| decoder.decode(&[id], &mut pool, &[1]).unwrap()).collect();
        assert_eq!(bits(&steps[steps.len() - vocab..]), bits(&logits), "{after} tokens");
        read = after;
        for i in 0..decoder.config().num_hidden_layers {
            let (s, inputs) = layer(&pool, i, 0);
            close(&s, &flat(&golden[&format!("{after}.{i}.s")]), &format!("S of layer {i} after {after} tokens"));
            let what = format!("inputs of layer {i} after {after} tokens");
            close(&inputs, &flat(&golden[&format!("{after}.{i}.inputs")]), &what);
        }
    }
}

#[test]
fn the_reference_agrees_with_the_package_rwkv() {
    let model = reference(&fixture(FIXTURE));
    let (golden, ids) = golden(FIXTURE);
    let mut memory = model.new_memory();
    for (read, &id) in (1..=10).zip(&ids) {
        let logits = model.step(id, &mut memory);
        if let Some(want) = golden.get(&format!("{read}.logits")) {
            close(&narrow(&logits), &flat(want), &format!("logits after {read} tokens"));
            for (i, memory) in memory.iter().enumerate() {
                close(&narrow(&memory.s), &flat(&golden[&format!("{read}.{i}.s")]), &format!("S of layer {i}"));
            }
        }
    }
}

#[test]
fn every_shape_agrees_with_the_reference() {
    for (seed, keys) in (31..).zip(MIXERS[3].configs) {
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
fn a_probe_changes_no_bit_and_counts_nothing() {
    let decoder = crate::common::decoder(MIXERS[3].configs[0], 5);
    let (mut pool, ids, mut probe) = (decoder.new_pool(2).unwrap(), Numbers::new(6).ids(50, 61), Probe::new());
    let probed = decoder.forward_probed(&row(&ids), &mut pool, &[0], &mut probe).unwrap();
    assert_eq!(bits(&flat(&probed)), bits(&flat(&decoder.forward(&row(&ids), &mut pool, &[1]).unwrap())));
    assert!(probe.iter().all(|layer| layer.denominators == 0) && pool.denominators().all == 0);
}

#[test]
fn a_checkpoint_has_the_tensors_of_the_published_layout() {
    let tensors = checkpoint::tensors(&config(MIXERS[3].configs[0]));
    for (name, shape) in [
        ("model.embeddings.weight", Some(&[61, 32][..])),
        ("model.norm.bias", Some(&[32])),
        ("lm_head.weight", Some(&[61, 32])),
        ("model.layers.0.pre_norm.weight", Some(&[32])),
        ("model.layers.1.pre_norm.weight", None),
        ("model.layers.0.attn.v_lora.lora.0.weight", None),
        ("model.layers.1.attn.v_lora.lora.0.weight", Some(&[4, 32])),
        ("model.layers.1.attn.w_lora.lora.2.bias", Some(&[32])),
        ("model.layers.1.attn.g_lora.lora.2.bias", None),
        ("model.layers.1.attn.x_g", Some(&[1, 1, 32])),
        ("model.layers.1.attn.r_k", Some(&[2, 16])),
        ("model.layers.1.attn.g_norm.bias", Some(&[32])),
        ("model.layers.1.ffn.x_k", Some(&[32])),
        ("model.layers.1.ffn.key.weight", Some(&[40, 32])),
    ] {
        assert_eq!(tensors.get(name).map(|shape| &**shape), shape, "{name}");
    }
}

#[test]
fn a_tensor_of_another_family_is_named() {
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path(), &config(MIXERS[3].configs[0]), 1);
    let file = folder.path().join("model.safetensors");
    let mut tensors = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
    let embedding = tensors.remove("model.embeddings.weight").unwrap();
    tensors.insert("model.embed_tokens.weight".into(), embedding);
    candle_core::safetensors::save(&tensors, &file).unwrap();
    let error = checkpoint::load(folder.path(), &Device::Cpu).unwrap_err();
    let LoadError::Tensors { problems, .. } = &error else { panic!("{error}") };
    assert_eq!(problems, &["missing tensor model.embeddings.weight", "unknown tensor model.embed_tokens.weight"]);
}

#[test]
fn packed_shares_of_the_first_published_version_are_read() {
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path(), &config(MIXERS[3].configs[0]), 1);
    let ids = Numbers::new(2).ids(20, 61);
    let logits = || {
        let decoder = checkpoint::load(folder.path(), &Device::Cpu)?;
        Ok::<_, LoadError>(decoder.prefill_logits(&ids, &mut decoder.new_pool(1).unwrap(), 0).unwrap())
    };
    let want = logits().unwrap();
    let file = folder.path().join("model.safetensors");
    let tensors = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
    let packed = |shape: &[usize]| {
        let mut tensors = tensors.clone();
        for layer in 0..2 {
            let take = |part: &str| tensors.remove(&format!("model.layers.{layer}.attn.x_{part}")).unwrap();
            let all = Tensor::cat(&["r", "w", "k", "v", "a", "g"].map(take), 0).unwrap().reshape(shape).unwrap();
            tensors.insert(format!("model.layers.{layer}.attn.x_x"), all);
        }
        candle_core::safetensors::save(&tensors, &file).unwrap();
    };
    for shape in [&[6, 32][..], &[6, 1, 1, 32]] {
        packed(shape);
        assert_eq!(bits(&logits().unwrap()), bits(&want), "{shape:?}");
    }
    packed(&[3, 64]);
    let error = logits().unwrap_err().to_string();
    assert!(error.contains("unknown tensor model.layers.0.attn.x_x"), "{error}");
    assert!(error.contains("missing tensor model.layers.1.attn.x_g"), "{error}");
}

/// Quantized matrices change the logits a little; the low-rank matrices keep their stored type.
#[test]
fn quantised_weights_give_nearly_the_same_logits() {
    let keys = MIXERS[3].configs[2];
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path(), &config(keys), 9);
    let ids = Numbers::new(10).ids(40, 61);
    let logits = |decoder: &Decoder| decoder.prefill_logits(&ids, &mut decoder.new_pool(1).unwrap(), 0).unwrap();
    let full = logits(&checkpoint::load(folder.path(), &Device::Cpu).unwrap());
    for (kind, bound) in [(WeightType::Bf16, 0.1), (WeightType::Q8_0, 0.2)] {
        let error = distance(&full, &logits(&checkpoint::load_as(folder.path(), kind).unwrap()));
        assert!(error > 0.0 && error < bound, "{kind}: {error}");
    }
    let stored = Stored::open(folder.path()).unwrap();
    let converted = |part: &str| stored.tensors().filter(|t| t.name.contains(part)).all(|tensor| tensor.quantised);
    assert!(converted("_proj.weight") && converted("ffn.key") && !converted("_lora."));
}

#[test]
fn random_weights_give_logits_that_vary() {
    let config = DecoderConfig { vocab_size: 61, ..config(MIXERS[3].configs[2]) };
    let decoder = Decoder::random(config, WeightType::Q8_0, 1).unwrap();
    let ids = Numbers::new(1).ids(100, 61);
    let logits = decoder.prefill_logits(&ids, &mut decoder.new_pool(1).unwrap(), 0).unwrap();
    assert!(logits.iter().all(|v| v.is_finite()) && logits.iter().any(|v| v.abs() > 0.1));
}
