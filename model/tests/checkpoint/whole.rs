//! Tests models that are one GGUF file, as llama.cpp writes it: they give the same numbers as their folders.
//!
//! llama.cpp's `convert_hf_to_gguf.py` has made `tests/fixtures-rwkv7/llamacpp.gguf` from that folder with
//! `--outtype bf16`, and `tests/fixtures-mamba2-llamacpp/llamacpp.gguf` with `--outtype f32`.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use candle_core::quantized::{GgmlDType, QTensor};
use tidegate_model::checkpoint::{self, Repacked, Stored};
use tidegate_model::{Decoder, DecoderConfig, Device, Tensor, WeightType};

use crate::common::{Numbers, bits, config, distance, flat, write_checkpoint};
use crate::llamacpp::{self, F32, Gguf};

/// A config of RWKV-7 whose matrix rows are whole blocks of every type.
const WIDE: &str = r#", "model_type": "rwkv7", "hidden_size": 256, "intermediate_size": 512, "head_dim": 64,
    "num_attention_heads": 4, "decay_low_rank_dim": 32, "a_low_rank_dim": 8, "v_low_rank_dim": 4,
    "gate_low_rank_dim": 64"#;

/// A config of RWKV-7 with three layers, one head as wide as the model, and four different low ranks.
const THREE: &str = r#", "model_type": "rwkv7", "hidden_size": 48, "head_dim": 48, "num_attention_heads": 1,
    "num_hidden_layers": 3, "decay_low_rank_dim": 8, "a_low_rank_dim": 6, "v_low_rank_dim": 4, "gate_low_rank_dim": 10"#;

/// A small config of RWKV-7 for tests of refusals.
pub(crate) const SMALL: &str = r#", "model_type": "rwkv7", "hidden_size": 32, "head_dim": 16, "decay_low_rank_dim": 4,
    "a_low_rank_dim": 3, "v_low_rank_dim": 2, "gate_low_rank_dim": 5"#;

/// A small config of Mamba-2 with an untied output head, and two groups of two heads.
pub(crate) const MAMBA: &str = r#", "model_type": "mamba2", "hidden_size": 32, "intermediate_size": 64,
    "num_attention_heads": 4, "head_dim": 16, "state_size": 12, "n_groups": 2, "bos_token_id": 0, "eos_token_id": 0"#;

/// A config of Mamba-2 with three layers, one group and a tied output head.
const TIED: &str = r#", "model_type": "mamba2", "hidden_size": 24, "intermediate_size": 48, "num_attention_heads": 6,
    "num_hidden_layers": 3, "head_dim": 8, "state_size": 20, "n_groups": 1, "conv_kernel": 2, "tie_word_embeddings": true,
    "bos_token_id": 0, "eos_token_id": 0"#;

fn fixtures(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name)
}

fn load(model: &Path) -> Decoder {
    checkpoint::load(model, &Device::Cpu).unwrap()
}

fn logits(decoder: &Decoder) -> Vec<f32> {
    let ids = Numbers::new(4).ids(50, decoder.config().vocab_size);
    decoder.prefill_logits(&ids, &mut decoder.new_pool(1).unwrap(), 0).unwrap()
}

/// Converts a tensor to one of ggml's types. Returns ggml's number for the type, and the bytes.
fn packed(kind: GgmlDType, tensor: &Tensor) -> (u32, Vec<u8>) {
    let number = match kind {
        GgmlDType::F32 => F32,
        GgmlDType::F16 => 1,
        GgmlDType::Q4_0 => 2,
        GgmlDType::Q4_1 => 3,
        GgmlDType::Q5_0 => 6,
        GgmlDType::Q5_1 => 7,
        GgmlDType::Q8_0 => 8,
        GgmlDType::Q2K => 10,
        GgmlDType::Q3K => 11,
        GgmlDType::Q4K => 12,
        GgmlDType::Q5K => 13,
        GgmlDType::Q6K => 14,
        GgmlDType::BF16 => 30,
        other => panic!("{other:?}"),
    };
    (number, QTensor::quantize(tensor, kind).unwrap().data().unwrap().into_owned())
}

/// Converts a folder's model to GGUF as llama.cpp does. `kind` chooses each tensor's type from its name in the folder.
fn converted(folder: &Path, kind: impl Fn(&str) -> GgmlDType) -> Gguf {
    let tensors = candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu).unwrap();
    let tensors = tensors.into_iter().map(|(name, tensor)| {
        let (kind, bytes) = packed(kind(&name), &tensor);
        (name, llamacpp::Tensor { shape: tensor.dims().to_vec(), kind, bytes })
    });
    let config = Stored::open(folder).unwrap().config().clone();
    match config.model_type.as_str() {
        "rwkv7" => llamacpp::rwkv7(&config, tensors.collect(), &[b"\n\n".to_vec(), b"\xe2\x98".to_vec()]),
        _ => llamacpp::mamba2(&config, tensors.collect(), &["<|endoftext|>", "a"]),
    }
}

/// Returns a small RWKV-7 model of random weights as llama.cpp writes it.
pub(crate) fn small() -> Gguf {
    small_of(SMALL)
}

/// Like [`small`], for a config of any family.
pub(crate) fn small_of(keys: &str) -> Gguf {
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path(), &config(keys), 5);
    converted(folder.path(), |_| GgmlDType::F32)
}

/// Replaces each `A_log` in a folder with the logarithm of the number that its GGUF file stores, because the two may
/// differ in the last bit.
fn round_logarithms(folder: &Path) {
    let path = folder.join("model.safetensors");
    let mut tensors = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
    for tensor in tensors.iter_mut().filter_map(|(name, tensor)| name.ends_with("A_log").then_some(tensor)) {
        let logs: Vec<f32> = flat(tensor).iter().map(|log| f64::from(log.exp()).ln() as f32).collect();
        *tensor = Tensor::from_slice(&logs, logs.len(), &Device::Cpu).unwrap();
    }
    candle_core::safetensors::save(&tensors, &path).unwrap();
}

/// Writes a file and returns its path.
pub(crate) fn written(place: &tempfile::TempDir, bytes: &[u8]) -> PathBuf {
    let path = place.path().join("tiny.gguf");
    std::fs::write(&path, bytes).unwrap();
    path
}

fn matrices(folder: &Path) -> Vec<String> {
    let stored = Stored::open(folder).unwrap();
    stored.tensors().filter(|tensor| tensor.quantised).map(|tensor| tensor.name.to_owned()).collect()
}

#[test]
fn a_file_of_llama_cpps_converter_has_the_logits_of_the_package_rwkv() {
    let decoder = load(&fixtures("fixtures-rwkv7").join("llamacpp.gguf"));
    let folder = Stored::open(&fixtures("fixtures-rwkv7")).unwrap();
    let stored = folder.config();
    // The converter chooses the ids of the special tokens itself.
    let want = DecoderConfig {
        bos_token_id: Some(0),
        eos_token_id: serde_json::from_str("0").unwrap(),
        architectures: Vec::new(),
        torch_dtype: None,
        ..stored.clone()
    };
    assert_eq!(decoder.config(), &want);
    close_to_golden(&decoder, &fixtures("fixtures-rwkv7"), "");
}

#[test]
fn a_file_of_llama_cpps_converter_has_the_logits_of_transformers() {
    let fixture = fixtures("fixtures-mamba2-llamacpp");
    let (decoder, folder) = (load(&fixture.join("llamacpp.gguf")), load(&fixture));
    let mut want = DecoderConfig { architectures: Vec::new(), torch_dtype: None, ..folder.config().clone() };
    // llama.cpp has no limits of the time step.
    want.state_space.as_mut().unwrap().time_step_limit = (0.0, None);
    assert_eq!(decoder.config(), &want);
    close_to_golden(&decoder, &fixture, "groups.");
    close_to_golden(&folder, &fixture, "groups.");
}

/// Compares a decoder's logits with the fixture's golden logits, whose names begin with `prefix`.
fn close_to_golden(decoder: &Decoder, fixture: &Path, prefix: &str) {
    let golden: HashMap<String, Tensor> =
        candle_core::safetensors::load(fixture.join("golden.safetensors"), &Device::Cpu).unwrap();
    let ids = flat(&golden["ids"].to_dtype(tidegate_model::DType::F32).unwrap());
    let ids: Vec<u32> = ids.iter().map(|&id| id as u32).collect();
    let (mut pool, mut read) = (decoder.new_pool(1).unwrap(), 0);
    for after in [1, 10, 1000] {
        let logits = decoder.prefill_logits(&ids[read..after], &mut pool, 0).unwrap();
        let error = distance(&logits, &flat(&golden[&format!("{prefix}{after}.logits")]));
        assert!(error < 1e-4, "after {after} tokens: {error}");
        read = after;
    }
}

#[test]
fn a_file_has_the_bits_of_its_folder() {
    for (seed, keys) in [(1, SMALL), (2, THREE), (3, WIDE), (4, MAMBA), (5, TIED)] {
        let (folder, place) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write_checkpoint(folder.path(), &config(keys), seed);
        round_logarithms(folder.path());
        let file = written(&place, &converted(folder.path(), |_| GgmlDType::F32).bytes());
        let (want, got) = (load(folder.path()), load(&file));
        assert_eq!(got.config().low_ranks, want.config().low_ranks);
        assert_eq!(got.config().state_space, want.config().state_space);
        let (want, got) = (logits(&want), logits(&got));
        assert!(want.iter().any(|v| v.abs() > 0.1), "nearly constant: {keys}");
        assert_eq!(bits(&got), bits(&want), "{keys}");
        let (file, folder) = (Stored::open(&file).unwrap(), Stored::open(folder.path()).unwrap());
        assert!(file.tensors().eq(folder.tensors()), "{keys}");
    }
}

#[test]
fn types_with_kernels_stay_as_they_are() {
    let (folder, place) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_checkpoint(folder.path(), &config(WIDE), 7);
    let matrices = matrices(folder.path());
    for (kind, to) in [
        (GgmlDType::F16, WeightType::F16),
        (GgmlDType::BF16, WeightType::Bf16),
        (GgmlDType::Q8_0, WeightType::Q8_0),
        (GgmlDType::Q4_0, WeightType::Q4_0),
        (GgmlDType::Q4K, WeightType::Q4K),
    ] {
        let chosen = |name: &str| if matrices.iter().any(|known| known == name) { kind } else { GgmlDType::F32 };
        let file = written(&place, &converted(folder.path(), chosen).bytes());
        let (got, want) = (load(&file), checkpoint::load_as(folder.path(), to).unwrap());
        assert_eq!(got.weight_bytes(), want.weight_bytes(), "{to}");
        assert_eq!(bits(&logits(&got)), bits(&logits(&want)), "{to}");
    }
}

/// Weights of a type without a kernel are dequantized and become q8_0.
#[test]
fn types_without_kernels_become_q8_0() {
    let [folder, rounded, place] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    write_checkpoint(folder.path(), &config(WIDE), 8);
    write_checkpoint(rounded.path(), &config(WIDE), 8);
    let weights = rounded.path().join("model.safetensors");
    let (matrices, exact) = (matrices(folder.path()), logits(&load(folder.path())));
    for (kind, bound) in [
        (GgmlDType::Q4_1, 2.0),
        (GgmlDType::Q5_0, 1.0),
        (GgmlDType::Q5_1, 1.0),
        (GgmlDType::Q2K, 4.0),
        (GgmlDType::Q3K, 3.0),
        (GgmlDType::Q5K, 1.0),
        (GgmlDType::Q6K, 0.5),
    ] {
        let chosen = |name: &str| if matrices.iter().any(|known| known == name) { kind } else { GgmlDType::F32 };
        let file = written(&place, &converted(folder.path(), chosen).bytes());
        let mut tensors =
            candle_core::safetensors::load(folder.path().join("model.safetensors"), &Device::Cpu).unwrap();
        for name in &matrices {
            let stored = QTensor::quantize(&tensors[name], kind).unwrap();
            tensors.insert(name.clone(), stored.dequantize(&Device::Cpu).unwrap());
        }
        candle_core::safetensors::save(&tensors, &weights).unwrap();
        let (got, want) = (load(&file), checkpoint::load_as(rounded.path(), WeightType::Q8_0).unwrap());
        assert_eq!(got.weight_bytes(), want.weight_bytes(), "{kind:?}");
        let errors = matrices.iter().map(|name| {
            let again = QTensor::quantize(&tensors[name], GgmlDType::Q8_0).unwrap().dequantize(&Device::Cpu).unwrap();
            let (stored, again) = (flat(&tensors[name]), flat(&again));
            let squares = |numbers: &mut dyn Iterator<Item = f32>| numbers.map(|v| f64::from(v).powi(2)).sum::<f64>();
            let differences = squares(&mut stored.iter().zip(&again).map(|(one, other)| one - other));
            (differences / squares(&mut stored.iter().copied())).sqrt()
        });
        let greatest = errors.fold(0.0, f64::max);
        assert!(greatest > 1e-4 && greatest < 0.02, "{kind:?}: {greatest}");
        // The report is the same before the decoder is loaded and after it.
        let [before, after] = [false, true].map(|load| {
            let opened = Stored::open(&file).unwrap();
            let _decoder = load.then(|| opened.decoder().unwrap());
            opened.repacked().unwrap()
        });
        assert_eq!(before, after);
        let [Repacked { from, to: WeightType::Q8_0, tensors: count, relative_error }] = before.as_slice() else {
            panic!("{before:?}")
        };
        assert_eq!(
            (from.replace('_', ""), *count),
            (format!("{kind:?}").to_lowercase().replace('_', ""), matrices.len())
        );
        assert!((relative_error / greatest - 1.0).abs() < 1e-9, "{kind:?}: {relative_error} and {greatest}");
        let line =
            format!("{from}: {count} tensors repacked to q8_0, relative error at most {:.2} %", 100.0 * greatest);
        assert_eq!(before[0].to_string(), line);
        let got = logits(&got);
        assert_eq!(bits(&got), bits(&logits(&want)), "{kind:?}");
        let error = distance(&got, &exact);
        assert!(error > 0.0 && error < bound, "{kind:?}: {error}");
    }
}

#[test]
fn types_with_kernels_are_not_repacked() {
    for fixture in ["fixtures-rwkv7", "fixtures-mamba2-llamacpp"] {
        let stored = Stored::open(&fixtures(fixture).join("llamacpp.gguf")).unwrap();
        assert_eq!(stored.repacked().unwrap(), []);
    }
}

/// The converter's `--outtype q8_0` quantizes most low-rank matrices too.
#[test]
fn low_rank_matrices_may_be_quantised() {
    let (folder, place) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_checkpoint(folder.path(), &config(WIDE), 9);
    let quantised = |name: &str| {
        let rows = name.ends_with("lora.0.weight") || name.ends_with("g_lora.lora.2.weight");
        if rows { GgmlDType::Q8_0 } else { GgmlDType::F32 }
    };
    let file = written(&place, &converted(folder.path(), quantised).bytes());
    let error = distance(&logits(&load(&file)), &logits(&load(folder.path())));
    assert!(error > 0.0 && error < 0.2, "{error}");
}

#[test]
fn vectors_may_have_dimensions_of_one() {
    let (mut file, place) = (small(), tempfile::tempdir().unwrap());
    let want = logits(&load(&written(&place, &file.bytes())));
    file.tensor("blk.1.channel_mix_lerp_k.weight").shape = vec![1, 1, 32];
    file.tensor("blk.0.time_mix_lerp_fused.weight").shape = vec![6, 32];
    file.tensor("blk.1.time_mix_r_k.weight").shape = vec![2, 16];
    assert_eq!(bits(&logits(&load(&written(&place, &file.bytes())))), bits(&want));
}

#[test]
fn metadata_are_read_by_key() {
    let place = tempfile::tempdir().unwrap();
    let file = written(&place, &small().with("a.float", llamacpp::Value::F32(1e-5)).bytes());
    let metadata = checkpoint::metadata(&file).unwrap();
    assert_eq!(metadata.architecture(), Ok("rwkv7"));
    assert_eq!(metadata.text("general.name"), Ok(Some("Tiny RWKV7")));
    assert_eq!((metadata.text("none"), metadata.number("none")), (Ok(None), Ok(None)));
    assert_eq!(metadata.number("rwkv7.wkv.head_size"), Ok(Some(16)));
    // An f32 is read as the shortest decimal number that rounds to it, as in a config.json.
    assert_eq!(metadata.float("a.float"), Ok(Some(1e-5)));
    let tokens: Vec<&[u8]> = metadata.texts("tokenizer.ggml.tokens").unwrap().unwrap().collect();
    assert_eq!((tokens.len(), tokens[0], tokens[1], tokens[60]), (61, &b"<s>"[..], &br"\n\n"[..], &b"[PAD60]"[..]));
    let types: Vec<u32> = metadata.words("tokenizer.ggml.token_type").unwrap().unwrap().collect();
    assert_eq!((types.len(), &types[..4]), (61, &[3, 1, 1, 5][..]));
    assert_eq!(
        metadata.number("general.name").unwrap_err().to_string(),
        "general.name must be a whole number, 0 or greater, found a text"
    );
}

#[test]
fn a_file_may_have_the_name_of_a_folders_weights() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("model.gguf");
    std::fs::write(&path, small().bytes()).unwrap();
    assert_eq!(checkpoint::weights_files(&path).unwrap(), std::slice::from_ref(&path));
    assert_eq!(load(&path).config().hidden_size, 32);
    let all: BTreeMap<_, _> = checkpoint::tensors(load(&path).config());
    assert_eq!(Stored::open(&path).unwrap().tensors().count(), all.len());
    assert!(checkpoint::gguf_architectures().eq(["rwkv7", "mamba2"]));
}
