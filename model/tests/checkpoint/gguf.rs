//! Tests checkpoints in GGUF: they equal the originals quantized at load time, and errors name what is broken.

use std::collections::BTreeMap;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

use crate::common::{Numbers, write_checkpoint};
use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
use tidegate_model::checkpoint::{self, Stored};
use tidegate_model::{DType, DecoderConfig, Device, WeightType};

const Q: &str = "model.layers.0.self_attn.q_proj.weight";
const NORM: &str = "model.norm.weight";

/// Returns a config whose matrices have rows of 256, 288 and 32 numbers: whole blocks of every type, whole blocks of
/// the types with blocks of 32, and a single such block.
fn config(extra: &str) -> DecoderConfig {
    let text = format!(
        r#"{{"model_type": "rfa_gate", "vocab_size": 61, "hidden_size": 256, "intermediate_size": 288,
            "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16, "proj_dim": 12{extra}}}"#
    );
    DecoderConfig::from_json(&text).unwrap()
}

fn ggml(kind: WeightType) -> GgmlDType {
    match kind {
        WeightType::F32 => GgmlDType::F32,
        WeightType::F16 => GgmlDType::F16,
        WeightType::Bf16 => GgmlDType::BF16,
        WeightType::Q8_0 => GgmlDType::Q8_0,
        WeightType::Q4_0 => GgmlDType::Q4_0,
        WeightType::Q4K => GgmlDType::Q4K,
    }
}

type Tensors = BTreeMap<String, QTensor>;

/// Returns the tensors of a folder of safetensors, with the matrices quantized.
fn quantised(folder: &Path, to: WeightType) -> Tensors {
    let tensors = candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu).unwrap();
    let stored = Stored::open(folder).unwrap();
    let matrices: Vec<&str> = stored.tensors().filter(|tensor| tensor.quantised).map(|tensor| tensor.name).collect();
    let tensors = tensors.into_iter().map(|(name, tensor)| {
        let kind = match tensor.dtype() {
            _ if matrices.contains(&&*name) => ggml(to.for_rows_of(*tensor.dims().last().unwrap())),
            DType::BF16 => GgmlDType::BF16,
            DType::F16 => GgmlDType::F16,
            _ => GgmlDType::F32,
        };
        let tensor = QTensor::quantize(&tensor, kind).unwrap();
        (name, tensor)
    });
    tensors.collect()
}

/// Returns the bytes of a GGUF file with these tensors.
fn file(tensors: &Tensors) -> Vec<u8> {
    use gguf_file::Value::{Array, String, U8, U32};

    let values = [
        ("general.architecture", String("rfagate".into())),
        ("general.alignment", U32(32)),
        ("some.words", Array(vec![String("one".into()), String("two".into())])),
        ("some.bytes", Array(vec![U8(1), U8(2), U8(3)])),
    ];
    let values: Vec<_> = values.iter().map(|(key, value)| (*key, value)).collect();
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let mut out = std::io::Cursor::new(Vec::new());
    gguf_file::write(&mut out, &values, &tensors).unwrap();
    out.into_inner()
}

/// Writes a folder with the config and a `model.gguf`.
fn folder(config: &DecoderConfig, bytes: &[u8]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), serde_json::to_string(config).unwrap()).unwrap();
    std::fs::write(folder.path().join("model.gguf"), bytes).unwrap();
    folder
}

/// Returns the tensors of a small checkpoint in q8_0.
fn small() -> Tensors {
    let original = tempfile::tempdir().unwrap();
    write_checkpoint(original.path(), &config(""), 5);
    quantised(original.path(), WeightType::Q8_0)
}

fn error(bytes: &[u8]) -> String {
    let folder = folder(&config(""), bytes);
    let stored = Stored::open(folder.path()).unwrap_err().to_string();
    assert_eq!(stored, checkpoint::load(folder.path(), &Device::Cpu).unwrap_err().to_string());
    assert!(stored.starts_with("model.gguf"), "{stored}");
    stored
}

/// Returns the position just after a tensor's name. There follow the number of dimensions, the dimensions, the type and
/// the offset.
fn behind(bytes: &[u8], name: &str) -> usize {
    bytes.windows(name.len()).position(|window| window == name.as_bytes()).unwrap() + name.len()
}

/// Returns the error of a file with the bytes `new` written `at` bytes after a tensor's name.
fn patched(bytes: &[u8], name: &str, at: usize, new: &[u8]) -> String {
    let (mut bytes, start) = (bytes.to_vec(), behind(bytes, name) + at);
    bytes[start..start + new.len()].copy_from_slice(new);
    error(&bytes)
}

#[test]
fn a_quantised_file_loads_like_its_original_quantised_at_load_time() {
    let ids = Numbers::new(4).ids(33, 61);
    for extra in ["", r#", "tie_word_embeddings": true, "conv_kernel": 4, "output_norm": true"#] {
        let config = config(extra);
        let original = tempfile::tempdir().unwrap();
        write_checkpoint(original.path(), &config, 3);
        let path = original.path().join("model.safetensors");
        let wide = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let tensors = wide.iter().map(|(name, t)| (name.clone(), t.to_dtype(dtype).unwrap())).collect();
            candle_core::safetensors::save(&tensors, &path).unwrap();
            for to in WeightType::ALL {
                let copy = folder(&config, &file(&quantised(original.path(), to)));
                let want = checkpoint::load_as(original.path(), to).unwrap();
                let got = checkpoint::load(copy.path(), &Device::Cpu).unwrap();
                assert_eq!(got.weight_bytes(), want.weight_bytes(), "{to}");
                let [want, got] = [want, got].map(|decoder| {
                    let logits = decoder.prefill_logits(&ids, &mut decoder.new_pool(1).unwrap(), 0).unwrap();
                    logits.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                });
                assert_eq!(got, want, "{dtype:?} to {to}{extra}");
            }
        }
    }
}

#[test]
fn the_header_is_read_like_candle_does() {
    let bytes = file(&small());
    let content = gguf_file::Content::read(&mut std::io::Cursor::new(&bytes)).unwrap();
    let folder = folder(&config(""), &bytes);
    let stored = Stored::open(folder.path()).unwrap();
    assert_eq!(stored.tensors().count(), content.tensor_infos.len());
    for tensor in stored.tensors() {
        let info = &content.tensor_infos[tensor.name];
        assert_eq!((tensor.shape, ggml(tensor.kind)), (info.shape.dims(), info.ggml_dtype), "{}", tensor.name);
        if !tensor.kind.is_quantised() {
            let read = content.tensor(&mut std::io::Cursor::new(&bytes), tensor.name, &Device::Cpu).unwrap();
            let read = read.dequantize(&Device::Cpu).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(stored.floats(tensor.name).unwrap(), read, "{}", tensor.name);
        }
    }
    assert!(stored.floats(Q).unwrap_err().to_string().contains(Q));
}

#[test]
fn safetensors_win_if_both_files_exist() {
    let both = folder(&config(""), b"no GGUF at all");
    write_checkpoint(both.path(), &config(""), 1);
    assert!(checkpoint::weights_files(both.path()).unwrap()[0].ends_with("model.safetensors"));
    checkpoint::load(both.path(), &Device::Cpu).unwrap();
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let bytes = file(&small());
    let last = behind(&bytes, NORM) + 24;
    for length in (0..last).step_by(3).chain([last, bytes.len() / 2, bytes.len() - 32]) {
        assert!(!error(&bytes[..length]).is_empty());
    }
    assert!(error(&bytes[..last - 9]).contains("within the tensors' descriptions"));
    assert!(error(&bytes[..bytes.len() / 2]).contains("lies outside the file"));
    assert!(error(&bytes[..100]).contains("within the metadata"));
    assert_eq!(error(&bytes[1..]), "model.gguf: must begin with GGUF");
}

#[test]
fn a_flipped_byte_of_the_header_never_panics() {
    let bytes = file(&small());
    let place = folder(&config(""), &bytes);
    let mut file = std::fs::OpenOptions::new().write(true).open(place.path().join("model.gguf")).unwrap();
    let mut put = |at: usize, byte: u8| {
        file.seek(SeekFrom::Start(at as u64)).unwrap();
        file.write_all(&[byte]).unwrap();
    };
    let mut refused = 0;
    for (at, &old) in bytes[..behind(&bytes, NORM) + 24].iter().enumerate() {
        for new in [0, 0xff, old ^ 0x80, old.wrapping_add(1)] {
            put(at, new);
            refused += u32::from(Stored::open(place.path()).is_err());
        }
        put(at, old);
    }
    assert!(refused > 1000, "{refused}");
}

#[test]
fn wrong_descriptions_name_their_tensor() {
    let bytes = file(&small());
    // After the name: the number of dimensions (4 bytes), two dimensions (16), the type (4) and the offset (8).
    let error = |at: usize, new: &[u8]| {
        let error = patched(&bytes, Q, at, new);
        assert!(error.contains(Q), "{error}");
        error
    };
    for offset in [1 << 40, u64::MAX - 31] {
        assert!(error(24, &offset.to_le_bytes()).contains("outside the file"));
    }
    assert!(error(24, &7u64.to_le_bytes()).contains("multiple of 32"));
    assert!(error(24, &64u64.to_le_bytes()).contains("overlap"));
    for number in [99u32, 16, u32::MAX] {
        let error = error(20, &number.to_le_bytes());
        assert!(error.contains(&format!("has dtype {number} (ggml), expected F32, BF16")), "{error}");
    }
    assert!(error(4, &32u64.to_le_bytes()).contains("has shape [32, 32], expected [32, 256]"));
    assert!(error(4, &255u64.to_le_bytes()).contains("not a multiple of a Q8_0 block"));
    for huge in [1u64 << 62, u64::MAX - 31] {
        assert!(error(4, &huge.to_le_bytes()).contains("outside the file"));
        assert!(error(12, &huge.to_le_bytes()).contains("outside the file"));
    }
    assert!(error(0, &5u32.to_le_bytes()).contains("at most 4 dimensions"));
    assert!(error(0, &u32::MAX.to_le_bytes()).contains("at most 4 dimensions"));
}

#[test]
fn tensors_that_do_not_fit_the_config_are_named_together() {
    let mut tensors = small();
    let gone = tensors.remove("model.layers.1.self_attn.sigma").unwrap();
    tensors.insert("model.layers.9.self_attn.sigma".into(), gone);
    let norm = tensors[NORM].dequantize(&Device::Cpu).unwrap();
    tensors.insert(NORM.into(), QTensor::quantize(&norm, GgmlDType::Q8_0).unwrap());
    let other = tensors[Q].dequantize(&Device::Cpu).unwrap();
    tensors.insert(Q.into(), QTensor::quantize(&other, GgmlDType::Q4_0).unwrap());
    let error = error(&file(&tensors));
    for part in [
        "missing tensor model.layers.1.self_attn.sigma",
        "unknown tensor model.layers.9.self_attn.sigma",
        "model.norm.weight has dtype Q8_0, expected F32, BF16, F16",
        "q_proj.weight, model.layers.0.self_attn.k_proj.weight, model.layers.0.self_attn.v_proj.weight must have one type",
    ] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_tensor_described_twice_is_refused() {
    let mut tensors = small();
    tensors.insert("model.nerm.weight".into(), QTensor::quantize(&norm(&tensors), GgmlDType::F32).unwrap());
    let mut bytes = file(&tensors);
    let at = behind(&bytes, "model.nerm.weight") - "nerm.weight".len();
    bytes[at..at + 4].copy_from_slice(b"norm");
    assert!(error(&bytes).contains("model.norm.weight appears twice"));
}

fn norm(tensors: &Tensors) -> tidegate_model::Tensor {
    tensors[NORM].dequantize(&Device::Cpu).unwrap()
}

/// Returns a header with these counts, and one metadata key with this value.
fn head(tensors: u64, pairs: u64, value: &[u8]) -> Vec<u8> {
    let key = b"general.alignment";
    let numbers = [tensors, pairs, key.len() as u64].map(u64::to_le_bytes).concat();
    [&b"GGUF\x03\0\0\0"[..], &numbers, key, value].concat()
}

#[test]
fn hostile_metadata_takes_neither_memory_nor_stack() {
    for alignment in [0u32, 7, 4, u32::MAX] {
        let value = [4u32.to_le_bytes(), alignment.to_le_bytes()].concat();
        assert!(error(&head(0, 1, &value)).contains("general.alignment must be"), "{alignment}");
    }
    let other = |mut bytes: Vec<u8>| {
        bytes[32] = b'x';
        error(&bytes)
    };
    let text = |kind: u32, length: u64| [&kind.to_le_bytes()[..], &length.to_le_bytes()].concat();
    assert!(other(head(0, 1, &text(8, u64::MAX))).contains("within the metadata"));
    let array = |kind: u32| [&9u32.to_le_bytes()[..], &text(kind, u64::MAX)].concat();
    for kind in [0, 8, 9, 12] {
        assert!(other(head(0, 1, &array(kind))).contains("within the metadata"), "{kind}");
    }
    let deep: Vec<u8> = (0..100_000).flat_map(|_| text(9, 1)).collect();
    assert!(other(head(0, 1, &[&9u32.to_le_bytes()[..], &deep].concat())).contains("arrays in arrays"));
    assert!(other(head(0, 1, &77u32.to_le_bytes())).contains("unknown type 77"));
    assert!(error(&head(0, u64::MAX, &text(10, 0))).contains("must have at most 65536 keys of metadata, found 1844"));
    assert!(error(&head(u64::MAX, 1, &text(10, 0))).contains("must have at most 65536 tensors, found 1844"));
}
