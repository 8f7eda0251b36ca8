//! Compares decoders with PyTorch, which wrote the weights, inputs, logits and states under `tests/fixtures`. They must
//! agree to 1e-4.

use std::collections::HashMap;

use crate::common::{distance, fixtures, flat};
use tidegate_model::{Decoder, Device, StatePool, Tensor, checkpoint};

const TOLERANCE: f32 = 1e-4;

fn compare_states(name: &str, decoder: &Decoder, pool: &StatePool, golden: &HashMap<String, Tensor>, batch: usize) {
    let config = decoder.config();
    let (d, features) = (config.head_dim, config.features());
    for layer in 0..config.num_hidden_layers {
        let get = |part: &str| golden.get(&format!("state.{layer}.{part}"));
        // The fixtures do not hold the keys and values of windows, but the logits depend on them.
        assert_eq!(get("s").is_some(), features > 0, "{name}");
        if features == 0 {
            continue;
        }
        assert_eq!(get("m").is_some(), config.feature_map.has_maximum(), "{name}");
        for row in 0..batch {
            let (memory, conv) = pool.layer(layer, row).unwrap();
            let s = memory.narrow(1, 0, features * d).unwrap().reshape(((), features, d)).unwrap();
            let z = memory.narrow(1, features * d, features).unwrap().unsqueeze(2).unwrap();
            let s_plus = Tensor::cat(&[s, z], 2).unwrap();
            let error = distance(&flat(&s_plus), &flat(&get("s").unwrap().get(row).unwrap()));
            assert!(error < TOLERANCE, "{name}: S and z of layer {layer}: {error}");
            // After S and z come c and the maximum of the keys.
            for (at, part) in ["c", "m"].into_iter().enumerate() {
                let Some(want) = get(part) else { continue };
                let number = memory.narrow(1, features * (d + 1) + at, 1).unwrap();
                let error = distance(&flat(&number), &flat(&want.get(row).unwrap()));
                assert!(error < TOLERANCE, "{name}: {part} of layer {layer}: {error}");
            }
            if let Some(want) = get("conv") {
                // PyTorch stores (3, kernel - 1, inner); we store (kernel - 1, 3 inner).
                let want = want.get(row).unwrap().transpose(0, 1).unwrap().contiguous().unwrap();
                let error = distance(&flat(&conv.unwrap()), &flat(&want));
                assert!(error < TOLERANCE, "{name}: the convolution's inputs in layer {layer}: {error}");
            } else {
                assert!(conv.is_none());
            }
        }
    }
}

/// Every folder of `tests/fixtures`.
const NAMES: [&str; 20] = [
    "arc-cosine",
    "arc-cosine-no-gate",
    "base",
    "bf16",
    "clamped",
    "conv-norm",
    "elu",
    "elu-no-gate",
    "f16",
    "favor",
    "favor-no-gate",
    "hybrid",
    "hybrid-no-gate",
    "long",
    "no-gate",
    "rope",
    "softmax",
    "softmax-window",
    "untied",
    "wide-features",
];

#[test]
fn logits_and_states_agree_with_pytorch() {
    for name in NAMES {
        let folder = fixtures().join(name);
        let decoder = checkpoint::load(&folder, &Device::Cpu).unwrap();
        let golden = candle_core::safetensors::load(folder.join("golden.safetensors"), &Device::Cpu).unwrap();
        let ids = golden["ids"].to_dtype(candle_core::DType::U32).unwrap();
        let (batch, time) = ids.dims2().unwrap();
        let want = flat(&golden["logits"]);
        let spread = want.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        assert!(spread > 0.5, "{name}: the golden logits are nearly constant");

        let slots: Vec<usize> = (0..batch).collect();
        let mut pool = decoder.new_pool(batch).unwrap();
        let whole = decoder.forward(&ids, &mut pool, &slots).unwrap();
        let error = distance(&flat(&whole), &want);
        assert!(error < TOLERANCE, "{name}: chunked: {error}");
        compare_states(name, &decoder, &pool, &golden, batch);

        let mut pool = decoder.new_pool(batch).unwrap();
        let steps: Vec<Tensor> =
            (0..time).map(|t| decoder.forward(&ids.narrow(1, t, 1).unwrap(), &mut pool, &slots).unwrap()).collect();
        let error = distance(&flat(&Tensor::cat(&steps, 1).unwrap()), &want);
        assert!(error < TOLERANCE, "{name}: one step after another: {error}");
        compare_states(name, &decoder, &pool, &golden, batch);
    }
    let folders = std::fs::read_dir(fixtures()).unwrap();
    let mut names: Vec<_> = folders.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, NAMES);
}
