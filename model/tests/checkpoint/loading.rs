//! Tests that a checkpoint that does not fit its config is refused, with all differences in one error.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use crate::common::{Numbers, config, write_checkpoint};
use tidegate_model::checkpoint::{self, LoadError};
use tidegate_model::{DType, Device, Tensor};

#[test]
fn missing_extra_and_misshapen_tensors_are_named_in_one_error() {
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path(), &config(""), 1);
    let file = folder.path().join("model.safetensors");
    let mut tensors = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
    let gone = tensors.remove("model.layers.1.self_attn.sigma").unwrap();
    tensors.insert("model.layers.9.mlp.up_proj.weight".into(), gone);
    let wide = Tensor::zeros((24, 5), DType::F32, &Device::Cpu).unwrap();
    tensors.insert("model.layers.0.self_attn.q_proj.weight".into(), wide);
    let whole = Tensor::zeros(24, DType::U32, &Device::Cpu).unwrap();
    tensors.insert("model.norm.weight".into(), whole);
    candle_core::safetensors::save(&tensors, &file).unwrap();
    let error = checkpoint::load(folder.path(), &Device::Cpu).unwrap_err();
    let LoadError::Tensors { problems, .. } = &error else { panic!("{error}") };
    assert_eq!(problems.len(), 4, "{error}");
    let text = error.to_string();
    for word in [
        "missing tensor model.layers.1.self_attn.sigma",
        "unknown tensor model.layers.9",
        "[24, 5], expected [16, 24]",
        "U32",
    ] {
        assert!(text.contains(word), "{text}");
    }
}

#[test]
fn a_tensor_of_another_kind_of_attention_is_named() {
    let refused = |extra: &str, change: &dyn Fn(&mut HashMap<String, Tensor>)| {
        let folder = tempfile::tempdir().unwrap();
        write_checkpoint(folder.path(), &config(extra), 1);
        let file = folder.path().join("model.safetensors");
        let mut tensors = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
        change(&mut tensors);
        candle_core::safetensors::save(&tensors, &file).unwrap();
        checkpoint::load(folder.path(), &Device::Cpu).unwrap_err().to_string()
    };
    let (favor, elu) = (r#", "feature_map": "favor""#, r#", "feature_map": "elu", "proj_dim": 0"#);
    let hybrid = r#", "attention": "hybrid", "sliding_window": 8"#;
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    let bias = |numbers: [f32; 2]| Tensor::new(&numbers, &Device::Cpu).unwrap();
    for (extra, part, tensor, words) in [
        (favor, "sigma", Some(zeros(&[2, 8])), "unknown tensor"),
        (elu, "sigma", Some(zeros(&[2, 8])), "unknown tensor"),
        (elu, "random_matrices", Some(zeros(&[2, 12, 8])), "unknown tensor"),
        (favor, "random_matrices", Some(zeros(&[2, 16, 8])), "has shape [2, 16, 8], expected [2, 12, 8]"),
        (favor, "random_matrices", None, "missing tensor"),
        ("", "far_bias", Some(zeros(&[2])), "unknown tensor"),
        (hybrid, "far_bias", None, "missing tensor"),
        (hybrid, "far_bias", Some(zeros(&[3])), "has shape [3], expected [2]"),
        (hybrid, "far_bias", Some(bias([0.5, f32::NAN])), "must have finite numbers, found NaN"),
        (hybrid, "far_bias", Some(bias([f32::NEG_INFINITY, 0.5])), "must have finite numbers, found -inf"),
    ] {
        let name = format!("model.layers.1.self_attn.{part}");
        let error = refused(extra, &|tensors| match &tensor {
            Some(tensor) => drop(tensors.insert(name.clone(), tensor.clone())),
            None => drop(tensors.remove(&name).unwrap()),
        });
        assert!(error.contains(&name) && error.contains(words), "{extra}: {error}");
        assert_eq!(error.lines().count(), 2, "one problem: {error}");
    }
}

#[test]
fn a_broken_file_is_an_error_that_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let error = |folder: &Path| checkpoint::load(folder, &Device::Cpu).unwrap_err().to_string();
    assert!(error(folder.path()).contains("config.json"));
    std::fs::write(folder.path().join("config.json"), "{").unwrap();
    assert!(error(folder.path()).contains("config.json"));
    write_checkpoint(folder.path(), &config(""), 1);
    let file = folder.path().join("model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    for broken in [&bytes[..0], &bytes[..7], &bytes[..bytes.len() / 2], &[255; 64]] {
        std::fs::write(&file, broken).unwrap();
        assert!(error(folder.path()).contains("model.safetensors"), "{}", error(folder.path()));
    }
    std::fs::remove_file(&file).unwrap();
    assert!(error(folder.path()).contains("model.safetensors"));
}

#[test]
fn sixteen_bit_weights_give_nearly_the_same_logits() {
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path(), &config(r#", "conv_kernel": 4"#), 2);
    let file = folder.path().join("model.safetensors");
    let tensors = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
    let ids = Numbers::new(3).ids(40, 61);
    let logits = || {
        let decoder = checkpoint::load(folder.path(), &Device::Cpu).unwrap();
        decoder.prefill_logits(&ids, &mut decoder.new_pool(1).unwrap(), 0).unwrap()
    };
    let full = logits();
    for (dtype, bound) in [(DType::F16, 0.01), (DType::BF16, 0.08)] {
        let narrow = tensors.iter().map(|(name, t)| (name.clone(), t.to_dtype(dtype).unwrap())).collect();
        candle_core::safetensors::save(&narrow, &file).unwrap();
        let error = crate::common::distance(&full, &logits());
        assert!(error > 0.0 && error < bound, "{dtype:?}: {error}");
    }
}

/// Splits the weights of a folder into two files and an index of them.
fn split(folder: &Path) {
    let whole = folder.join("model.safetensors");
    let tensors = candle_core::safetensors::load(&whole, &Device::Cpu).unwrap();
    let part = |name: &str| format!("model-0000{}-of-00002.safetensors", if name.contains("layers.1") { 2 } else { 1 });
    for number in ["layers.0", "layers.1"].map(part) {
        let part: HashMap<String, Tensor> =
            tensors.clone().into_iter().filter(|(name, _)| part(name) == number).collect();
        candle_core::safetensors::save(&part, folder.join(number)).unwrap();
    }
    let map: BTreeMap<&String, String> = tensors.keys().map(|name| (name, part(name))).collect();
    let index = serde_json::json!({"metadata": {"total_size": 1}, "weight_map": map});
    std::fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
    std::fs::remove_file(whole).unwrap();
}

#[test]
fn weights_in_several_files_are_those_of_one() {
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path(), &config(r#", "tie_word_embeddings": false"#), 3);
    let logits = || {
        let decoder = checkpoint::load(folder.path(), &Device::Cpu).unwrap();
        decoder.prefill_logits(&[1, 2, 3], &mut decoder.new_pool(1).unwrap(), 0).unwrap()
    };
    let want = logits();
    split(folder.path());
    assert_eq!(logits(), want);
    assert_eq!(checkpoint::weights_files(folder.path()).unwrap().len(), 2);

    let refused = || checkpoint::load(folder.path(), &Device::Cpu).unwrap_err().to_string();
    let second = folder.path().join("model-00002-of-00002.safetensors");
    std::fs::copy(folder.path().join("model-00001-of-00002.safetensors"), &second).unwrap();
    assert!(refused().contains("is in another file as well"), "{}", refused());
    std::fs::remove_file(&second).unwrap();
    assert!(refused().contains("model-00002-of-00002.safetensors"), "{}", refused());
    for (index, words) in [
        (r#"{"weight_map": {"a": "../model.safetensors"}}"#, "must name files of its folder, found \"../model"),
        (r#"{"weight_map": {}}"#, "weight_map must name a file"),
        ("{}", "missing field `weight_map`"),
    ] {
        std::fs::write(folder.path().join("model.safetensors.index.json"), index).unwrap();
        assert!(refused().contains(words), "{}", refused());
    }
}
