//! Tests the portable decoder, which uses candle tensors: it agrees with PyTorch and, in f64, checks the fast decoder.

use std::collections::HashMap;

use candle_core::{Result, Var};
use candle_nn::VarBuilder;
use tidegate_model::{DType, Device, Tensor, checkpoint, portable};

use crate::common::{Numbers, config, distance, fixtures, flat, row, write_checkpoint};

fn numbers(tensor: &Tensor) -> Vec<f32> {
    flat(&tensor.to_dtype(DType::F32).unwrap())
}

/// The fixtures of the families that the portable decoder supports.
const NAMES: [&str; 13] = [
    "arc-cosine",
    "arc-cosine-no-gate",
    "base",
    "bf16",
    "clamped",
    "conv-norm",
    "elu",
    "elu-no-gate",
    "f16",
    "long",
    "no-gate",
    "rope",
    "untied",
];

#[test]
fn logits_and_states_agree_with_pytorch() -> Result<()> {
    for name in NAMES {
        let folder = fixtures().join(name);
        let golden = candle_core::safetensors::load(folder.join("golden.safetensors"), &Device::Cpu)?;
        let ids = golden["ids"].to_dtype(DType::U32)?;
        for dtype in [DType::F32, DType::F64] {
            let decoder = portable::Decoder::load(&folder, dtype, &Device::Cpu)?;
            let mut state = decoder.state(ids.dim(0)?)?;
            let logits = decoder.forward(&ids, &mut state)?;
            let error = distance(&numbers(&logits), &numbers(&golden["logits"]));
            assert!(error < 1e-4, "{name}: logits in {dtype:?}: {error}");
            for (i, layer) in state.layers.iter().enumerate() {
                let sums = Tensor::cat(&[&layer.s, &layer.z], 3)?;
                for (part, found) in [("s", sums), ("c", layer.c.clone())] {
                    let error = distance(&numbers(&found), &numbers(&golden[&format!("state.{i}.{part}")]));
                    assert!(error < 1e-4, "{name}: {part} of layer {i} in {dtype:?}: {error}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn it_is_the_oracle_of_the_fast_decoder_on_a_long_text() -> Result<()> {
    let every = r#", "conv_kernel": 4, "output_norm": true, "position_embedding": "rope""#;
    for (seed, extra) in ["", every, r#", "feature_map": "arc_cosine""#, r#", "gate": false"#].iter().enumerate() {
        let (folder, config) = (tempfile::tempdir()?, config(extra));
        write_checkpoint(folder.path(), &config, seed as u64);
        let ids = Numbers::new(7).ids(700, config.vocab_size);
        let oracle = portable::Decoder::load(folder.path(), DType::F64, &Device::Cpu)?;
        let want = oracle.forward(&row(&ids), &mut oracle.state(1)?)?;
        let decoder = checkpoint::load(folder.path(), &Device::Cpu).unwrap();
        let mut pool = decoder.new_pool(1).unwrap();
        let found = decoder.forward(&row(&ids), &mut pool, &[0]).unwrap();
        let error = distance(&flat(&found), &numbers(&want));
        assert!(error < 1e-4, "{extra}: {error}");
    }
    Ok(())
}

#[test]
fn a_text_may_be_read_in_pieces() -> Result<()> {
    let decoder = portable::Decoder::load(&fixtures().join("conv-norm"), DType::F32, &Device::Cpu)?;
    let ids = Numbers::new(1).ids(20, decoder.config().vocab_size);
    let (mut whole, mut pieces) = (decoder.state(1)?, decoder.state(1)?);
    let want = decoder.forward(&row(&ids), &mut whole)?;
    let first = decoder.forward(&row(&ids[..7]), &mut pieces)?;
    let mut fork = pieces.clone();
    let rest = decoder.forward(&row(&ids[7..]), &mut pieces)?;
    assert_eq!(flat(&want), [flat(&first), flat(&rest)].concat());
    assert_eq!(flat(&decoder.forward(&row(&ids[7..]), &mut fork)?), flat(&rest));
    Ok(())
}

#[test]
fn other_families_are_refused() {
    for (name, words) in [
        ("favor", "feature_map must be gaussian, arc_cosine or elu"),
        ("softmax", "attention must be rfa"),
        ("hybrid", "attention must be rfa"),
        ("../fixtures-seq2seq/seq2seq-rfa", "model_type must be that of a decoder"),
    ] {
        let error = portable::Decoder::load(&fixtures().join(name), DType::F32, &Device::Cpu).unwrap_err();
        assert!(error.to_string().contains(words), "{name}: {error}");
    }
}

#[test]
fn candle_differentiates_it() -> Result<()> {
    let (folder, config) = (tempfile::tempdir()?, config(r#", "conv_kernel": 3"#));
    write_checkpoint(folder.path(), &config, 5);
    let stored = candle_core::safetensors::load(folder.path().join("model.safetensors"), &Device::Cpu)?;
    let loss = |tensors: HashMap<String, Tensor>| -> Result<Tensor> {
        let weights = VarBuilder::from_tensors(tensors, DType::F64, &Device::Cpu);
        let decoder = portable::Decoder::new(config.clone(), &weights)?;
        decoder.forward(&row(&[3, 1, 4, 1, 5]), &mut decoder.state(1)?)?.sqr()?.mean_all()
    };
    let mut variables = HashMap::new();
    for (name, tensor) in &stored {
        variables.insert(name.clone(), Var::from_tensor(&tensor.to_dtype(DType::F64)?)?);
    }
    let tensors = || variables.iter().map(|(name, var)| (name.clone(), var.as_tensor().clone())).collect();
    let gradients = loss(tensors())?.backward()?;
    for (name, variable) in &variables {
        let gradient = gradients.get(variable).unwrap_or_else(|| panic!("{name} has no gradient"));
        // Compare with the finite difference in the direction of the gradient's signs.
        let direction = gradient.sign()?;
        let slope = (gradient * &direction)?.sum_all()?.to_scalar::<f64>()?;
        let beside = |step: f64| -> Result<f64> {
            let mut tensors: HashMap<String, Tensor> = tensors();
            tensors.insert(name.clone(), (variable.as_tensor() + (&direction * step)?)?);
            loss(tensors)?.to_scalar()
        };
        let difference = (beside(1e-6)? - beside(-1e-6)?) / 2e-6;
        assert!((slope - difference).abs() < 1e-4 * (1.0 + slope.abs()), "{name}: {slope} and {difference}");
        assert!(slope > 0.0, "{name} has no influence");
    }
    Ok(())
}
