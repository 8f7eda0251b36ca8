//! Tests that GGUF files that are broken or malicious are refused with the reason.

use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

use tidegate_model::Device;
use tidegate_model::checkpoint::{self, Stored};

use crate::common::Numbers;
use crate::llamacpp::{Gguf, Value, text};
use crate::whole::{MAMBA, SMALL, small, small_of, written};

/// Returns the error of a file that must be refused.
fn error(bytes: &[u8]) -> String {
    let place = tempfile::tempdir().unwrap();
    let path = written(&place, bytes);
    let stored = Stored::open(&path).unwrap_err().to_string();
    assert_eq!(stored, checkpoint::load(&path, &Device::Cpu).unwrap_err().to_string());
    assert!(stored.starts_with("tiny.gguf"), "{stored}");
    stored
}

fn refused(file: &Gguf, reason: &str) {
    let found = error(&file.bytes());
    assert!(found.contains(reason), "{found}\nexpected: {reason}");
}

/// Returns the offset at which the data of the first tensor begins.
fn data(file: &Gguf) -> usize {
    let all: usize = file.tensors.iter().map(|(_, tensor)| tensor.bytes.len().next_multiple_of(32)).sum();
    let last = file.tensors.last().unwrap().1.bytes.len();
    file.bytes().len() - (all - last.next_multiple_of(32) + last)
}

fn find(bytes: &[u8], part: &[u8]) -> usize {
    bytes.windows(part.len()).position(|window| window == part).unwrap()
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let place = tempfile::tempdir().unwrap();
    for file in [small_of(MAMBA), small()] {
        let (bytes, data) = (file.bytes(), data(&file));
        for length in (0..data).step_by(7).chain([data, bytes.len() / 2, bytes.len() - 1]) {
            let path = written(&place, &bytes[..length]);
            assert!(Stored::open(&path).is_err(), "{length}");
            assert!(length >= data || checkpoint::metadata(&path).is_err(), "{length}");
        }
    }
    let bytes = small().bytes();
    assert!(error(&bytes[..100]).contains("ends at byte 100, within the metadata"));
    assert!(error(&bytes[..bytes.len() - 1]).contains("lies outside the file"));
    assert!(error(b"").contains("ends at byte 0, within the head"));
    assert!(error(b"{}nothing of the kind").contains("must begin with GGUF"));
}

#[test]
fn changed_bytes_of_the_header_never_panic() {
    for keys in [SMALL, MAMBA] {
        changed_bytes_never_panic(&small_of(keys));
    }
}

fn changed_bytes_never_panic(file: &Gguf) {
    let (bytes, end) = (file.bytes(), data(file));
    let place = tempfile::tempdir().unwrap();
    let path = written(&place, &bytes);
    let mut stored = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    let mut put = |at: usize, part: &[u8]| {
        stored.seek(SeekFrom::Start(at as u64)).unwrap();
        stored.write_all(part).unwrap();
    };
    let (mut numbers, mut refused) = (Numbers::new(1), 0);
    for at in 0..end {
        let byte = [0, 0xff, bytes[at] ^ 0x80, bytes[at].wrapping_add(1)][at % 4];
        put(at, &[byte]);
        refused += u32::from(Stored::open(&path).is_err());
        put(at, &bytes[at..=at]);
    }
    assert!(refused > 200, "{refused}");
    // Several numbers of the header change at once.
    for round in 0..300 {
        let places: Vec<usize> = numbers.ids(4, end - 8).into_iter().map(|at| at as usize).collect();
        for &at in &places {
            let number = [u64::MAX, 1 << 63, 1 << 40, 0, round][at % 5];
            put(at, &number.to_le_bytes());
        }
        drop(Stored::open(&path));
        for &at in &places {
            put(at, &bytes[at..at + 8]);
        }
    }
    assert!(Stored::open(&path).is_ok());
}

#[test]
fn metadata_of_another_type_are_named() {
    for key in [
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "wkv.head_size",
        "attention.decay_lora_rank",
        "attention.iclr_lora_rank",
        "attention.value_residual_mix_lora_rank",
        "attention.gate_lora_rank",
        "attention.layer_norm_epsilon",
    ] {
        let key = format!("rwkv7.{key}");
        refused(&small().without(&key), &format!("{key} must be given, found none"));
        refused(&small().with(&key, text("7")), &format!("{key} must be a "));
        refused(&small().with(&key, Value::Bool(true)), "found true");
        refused(&small().with(&key, Value::I32(-7)), "found -7");
    }
    for (key, value, reason) in [
        ("general.architecture", Value::U32(7), "general.architecture must be a text in UTF-8, found 7"),
        ("general.architecture", Value::Text(b"\xff".into()), "must be a text in UTF-8, found other bytes"),
        ("general.architecture", text("llama"), "general.architecture must be rwkv7 or mamba2, found \"llama\""),
        ("tokenizer.ggml.tokens", text("a"), "tokenizer.ggml.tokens must be a list of texts, found a text"),
        ("tokenizer.ggml.tokens", Value::Words(vec![1]), "must be a list of texts, found a list of numbers"),
        (
            "tokenizer.ggml.eos_token_id",
            Value::U32(61),
            "tokenizer.ggml.eos_token_id must be between 0 and 60, found 61",
        ),
        ("tokenizer.ggml.bos_token_id", text("a"), "tokenizer.ggml.bos_token_id must be a whole number"),
        ("rwkv7.attention.layer_norm_epsilon", Value::F32(f32::NAN), "must be a finite float, found NaN"),
        ("rwkv7.attention.layer_norm_epsilon", Value::F32(2.0), "layer_norm_epsilon must be between"),
        ("split.count", Value::U32(3), "split.count must be 1, found 3"),
        ("general.alignment", Value::U32(7), "general.alignment must be a u32 and a multiple of 8"),
        ("general.alignment", text("32"), "general.alignment must be a u32 and a multiple of 8"),
    ] {
        refused(&small().with(key, value), reason);
    }
    refused(&small().without("general.architecture"), "general.architecture must be given, found none");
    refused(&small().without("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens must be given, found none");
    refused(
        &small().with("split.count", Value::U32(1)).with("rwkv7.block_count", Value::U32(1)),
        "unknown tensor blk.1.",
    );
}

#[test]
fn huge_counts_are_refused_before_they_cost_anything() {
    for huge in [1 << 20, 1 << 40, u64::MAX] {
        for (key, reason) in [
            ("embedding_length", "rwkv7.embedding_length must be between 1 and 65536"),
            ("block_count", "rwkv7.block_count must be between 1 and 1024"),
            ("feed_forward_length", "rwkv7.feed_forward_length must be between 1 and 262144"),
            ("wkv.head_size", "num_attention_heads must be between 1 and 1024, found 0"),
            ("attention.gate_lora_rank", "rwkv7.attention.gate_lora_rank must be between 1 and 65536"),
        ] {
            refused(&small().with(&format!("rwkv7.{key}"), Value::U64(huge)), reason);
        }
    }
    refused(&small().with("rwkv7.wkv.head_size", Value::U32(0)), "rwkv7.wkv.head_size must be a multiple of 16");
    let bytes = small().bytes();
    let changed = |at: usize, number: u64| {
        let mut bytes = bytes.clone();
        bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
        error(&bytes)
    };
    // The counts of tensors and of keys.
    assert!(changed(8, u64::MAX).contains("must have at most 65536 tensors, found 18446744073709551615"));
    assert!(changed(16, u64::MAX).contains("must have at most 65536 keys of metadata"));
    changed(8, 60_000);
    // The number of tokens, and the length of a token.
    let tokens = find(&bytes, b"tokenizer.ggml.tokens") + b"tokenizer.ggml.tokens".len() + 8;
    for number in [1 << 30, u64::MAX] {
        assert!(changed(tokens, number).contains("within the metadata"));
        assert!(changed(tokens + 8, number).contains("within the metadata"));
    }
    // The lengths of a key and of a tensor's name.
    let key = find(&bytes, b"general.name") - 8;
    assert!(changed(key, 2000).contains("has a key of metadata of 2000 bytes, the maximum is 1024"));
    assert!(changed(key, u64::MAX).contains("within the metadata"));
    let name = find(&bytes, b"output_norm.weight") - 8;
    assert!(changed(name, 2000).contains("has a tensor's name of 2000 bytes, the maximum is 1024"));
}

#[test]
fn metadata_of_mamba2_are_checked() {
    for key in [
        "embedding_length",
        "block_count",
        "ssm.conv_kernel",
        "ssm.inner_size",
        "ssm.state_size",
        "ssm.time_step_rank",
        "ssm.group_count",
        "attention.layer_norm_rms_epsilon",
    ] {
        let key = format!("mamba2.{key}");
        refused(&small_of(MAMBA).without(&key), &format!("{key} must be given, found none"));
        refused(&small_of(MAMBA).with(&key, Value::I32(-7)), "found -7");
        refused(&small_of(MAMBA).with(&key, Value::U64(u64::MAX)), "must be ");
        refused(&small_of(MAMBA).with(&key, Value::U32(0)), "must be ");
    }
    for (key, value, reason) in [
        ("ssm.inner_size", 65, "mamba2.ssm.inner_size must be num_heads * head_dim"),
        ("ssm.group_count", 3, "mamba2.ssm.group_count must be a divisor of num_heads (4), found 3"),
        ("ssm.state_size", 2000, "mamba2.ssm.state_size must be between 1 and 1024, found 2000"),
        ("ssm.conv_kernel", 1, "mamba2.ssm.conv_kernel must be 0 for none, or between 2 and 16, found 1"),
        ("ssm.time_step_rank", 2, "blk.0.ssm_in.weight has shape [180, 32], expected [178, 32]"),
    ] {
        refused(&small_of(MAMBA).with(&format!("mamba2.{key}"), Value::U32(value)), reason);
    }
}

/// With an `A` of 0 or more, a state would never decay; infinities and NaN are invalid.
#[test]
fn decays_that_are_not_negative_are_refused() {
    let place = tempfile::tempdir().unwrap();
    for number in [0.0, 0.5, f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        let mut file = small_of(MAMBA);
        file.tensor("blk.1.ssm_a").bytes[4..8].copy_from_slice(&number.to_le_bytes());
        let error = checkpoint::load(&written(&place, &file.bytes()), &Device::Cpu).unwrap_err().to_string();
        let reason = format!("backbone.layers.1.mixer.A_log must be stored as negative numbers, found {number}");
        assert!(error.contains(&reason), "{error}");
    }
}

#[test]
fn tensors_of_mamba2_that_do_not_fit_are_named_together() {
    let mut file = small_of(MAMBA);
    file.tensors.retain(|(name, _)| name != "blk.1.ssm_conv1d.bias");
    file.tensor("blk.0.ssm_norm.weight").shape = vec![4, 8];
    file.tensor("blk.0.ssm_conv1d.weight").shape = vec![4, 112];
    let bias = file.tensor("blk.0.ssm_dt.bias").clone();
    file.tensors.push(("blk.0.ssm_in.bias".into(), bias));
    let found = error(&file.bytes());
    let lines: Vec<&str> = found.lines().map(str::trim).collect();
    assert_eq!(
        lines,
        [
            "tiny.gguf does not fit its metadata:",
            "blk.0.ssm_conv1d.weight has shape [4, 112], expected [112, 1, 4]",
            "blk.0.ssm_norm.weight has shape [4, 8], expected [64]",
            "missing tensor blk.1.ssm_conv1d.bias",
            "unknown tensor blk.0.ssm_in.bias",
        ]
    );
}

#[test]
fn names_must_be_utf8() {
    let bytes = small().bytes();
    for (part, reason) in [
        ("general.name", "has a key of metadata that is not UTF-8"),
        ("output_norm.weight", "has a tensor's name that is not UTF-8"),
    ] {
        let (mut bytes, at) = (bytes.clone(), find(&bytes, part.as_bytes()));
        bytes[at] = 0xff;
        assert!(error(&bytes).contains(reason), "{}", error(&bytes));
    }
}

#[test]
fn what_appears_twice_is_refused() {
    let mut file = small();
    file.metadata.push(("general.name".into(), text("another")));
    refused(&file, "general.name appears twice");
    let mut file = small();
    let first = file.tensors[0].clone();
    file.tensors.push(first);
    refused(&file, "blk.0.time_mix_lerp_fused.weight appears twice");
}

#[test]
fn tensors_that_overlap_are_refused() {
    let bytes = small().bytes();
    // After the name: the number of dimensions, one dimension, the type and the offset.
    let at = |name: &[u8]| find(&bytes, name) + name.len() + 4 + 8 + 4;
    let (norm, bias) = (at(b"output_norm.weight"), at(b"output_norm.bias"));
    let mut overlapping = bytes.clone();
    overlapping.copy_within(norm..norm + 8, bias);
    let found = error(&overlapping);
    assert!(found.contains("overlap") && found.contains("output_norm.bias"), "{found}");
    for offset in [1u64 << 40, u64::MAX - 31] {
        overlapping[bias..bias + 8].copy_from_slice(&offset.to_le_bytes());
        assert!(error(&overlapping).contains("output_norm.bias lies outside the file"));
    }
}

#[test]
fn tensors_that_do_not_fit_are_named_together_as_in_the_file() {
    let mut file = small();
    file.tensors.retain(|(name, _)| name != "blk.1.time_mix_lerp_fused.weight");
    file.tensor("blk.0.time_mix_lerp_fused.weight").shape = vec![3, 64];
    file.tensor("blk.0.time_mix_receptance.weight").shape = vec![16, 64];
    file.tensor("output_norm.weight").kind = 26;
    let norm = file.tensor("output_norm.bias").clone();
    file.tensors.push(("blk.7.attn_norm.bias".into(), norm.clone()));
    file.tensors.push(("blk.1.attn_q.weight".into(), norm));
    let found = error(&file.bytes());
    let lines: Vec<&str> = found.lines().map(str::trim).collect();
    assert_eq!(
        lines,
        [
            "tiny.gguf does not fit its metadata:",
            "blk.0.time_mix_lerp_fused.weight has shape [3, 64], which is not that of the model",
            "blk.0.time_mix_receptance.weight has shape [16, 64], expected [32, 32]",
            "missing tensor blk.1.time_mix_lerp_fused.weight",
            "output_norm.weight has dtype 26 (ggml), expected F32, BF16, F16",
            "unknown tensor blk.1.attn_q.weight",
            "unknown tensor blk.7.attn_norm.bias",
        ]
    );
}

#[test]
fn the_shares_may_not_be_quantised() {
    let mut file = small();
    let shares = file.tensor("blk.0.time_mix_lerp_fused.weight");
    (shares.kind, shares.bytes) = (8, vec![0; 6 * 34]);
    let found = error(&file.bytes());
    let reason = "blk.0.time_mix_lerp_fused.weight has dtype Q8_0, expected F32, BF16, F16";
    assert_eq!(found.matches(reason).count(), 1, "{found}");
}

#[test]
fn a_big_endian_file_is_named() {
    let mut bytes = small().bytes();
    bytes[4..8].copy_from_slice(&3u32.to_be_bytes());
    assert!(error(&bytes).contains("must be little-endian, found big-endian"));
    bytes[4..8].copy_from_slice(&9u32.to_le_bytes());
    assert!(error(&bytes).contains("version must be 2 or 3, found 9"));
}

#[test]
fn a_folder_is_not_read_as_a_file() {
    let place = tempfile::tempdir().unwrap();
    assert!(checkpoint::metadata(place.path()).is_err());
    assert!(checkpoint::metadata(Path::new("/nowhere.gguf")).unwrap_err().to_string().contains("/nowhere.gguf"));
}
