//! Tests the encoder-decoder: it agrees with PyTorch, and the bits of a translation depend on source and text alone.

use std::collections::HashMap;
use std::path::Path;

use crate::common::{Numbers, bits, config, distance, flat, row, written};
use crate::promises::{pool, state};
use tidegate_model::{Decoder, DecoderConfig, Device, ModelError, PoolOptions, StateType, Tensor, Threads, checkpoint};

const TOLERANCE: f32 = 1e-4;
const SOURCE: &str = r#", "model_type": "rfa_seq2seq", "encoder_layers": 2, "max_source_positions": 300,
    "decoder_start_token_id": 1, "position_embedding": "rope""#;
const RFA: &str = r#", "conv_kernel": 4, "cross_proj_dim": 20"#;
const SOFTMAX: &str = r#", "attention": "softmax", "sliding_window": 40, "conv_kernel": 3"#;

fn both() -> [(&'static str, Decoder); 2] {
    let of = |more: &str| written(&config(&format!("{SOURCE}{more}")), 9);
    [("rfa", of(RFA)), ("softmax", of(SOFTMAX))]
}

fn compare_sources(name: &str, config: &DecoderConfig, numbers: &[f32], golden: &HashMap<String, Tensor>, case: usize) {
    let (layout, d) = (config.state_layout(), config.head_dim);
    let numbers = &numbers[layout.memory() + layout.conv()..];
    assert_eq!(numbers.len(), layout.source(), "{name}");
    for layer in 0..layout.layers {
        let get = |part: &str| golden.get(&format!("{case}.cross.{layer}.{part}")).map(flat);
        for head in 0..layout.heads {
            let own = &numbers[(layer * layout.heads + head) * layout.cross..][..layout.cross];
            let close = |got: &[f32], want: &[f32], what: &str| {
                let error = distance(got, want);
                assert!(error < TOLERANCE, "{name}, case {case}: {what} of layer {layer}, head {head}: {error}");
            };
            if let (Some(s), Some(z), Some(c)) = (get("s"), get("z"), get("c")) {
                let vectors = config.cross_proj_dim.unwrap_or(config.proj_dim);
                let features = config.feature_map.features(vectors, d);
                let (matrix, beside) = own.split_at(features * d);
                close(matrix, &s[head * features * d..][..features * d], "S");
                close(&beside[..features], &z[head * features..][..features], "z");
                close(&beside[features..], &c[..1], "c");
            } else {
                let (k, v) = (get("k").unwrap(), get("v").unwrap());
                let len = k.len() / layout.heads;
                let (keys, values) = own.split_at(own.len() / 2);
                close(&keys[..len], &k[head * len..][..len], "keys");
                close(&values[..len], &v[head * len..][..len], "values");
                assert!(keys[len..].iter().chain(&values[len..]).all(|v| *v == 0.0), "{name}: after the source");
            }
        }
    }
}

/// Compares the state of self attention.
fn compare_own(name: &str, config: &DecoderConfig, numbers: &[f32], golden: &HashMap<String, Tensor>, case: usize) {
    let (layout, d, features) = (config.state_layout(), config.head_dim, config.features());
    assert_eq!(golden.contains_key(&format!("{case}.self.0.s")), features > 0, "{name}");
    for (at, own) in numbers[..layout.memory()].chunks_exact(layout.head).enumerate().filter(|_| features > 0) {
        let (layer, head) = (at / layout.heads, at % layout.heads);
        let get = |part: &str, len: usize| {
            flat(&golden[&format!("{case}.self.{layer}.{part}")])[head * len..][..len].to_vec()
        };
        let want = [get("s", features * d), get("z", features), get("c", 1)].concat();
        let error = distance(own, &want);
        assert!(error < TOLERANCE, "{name}, case {case}: S, z and c of layer {layer}, head {head}: {error}");
    }
}

#[test]
fn logits_and_sources_agree_with_pytorch() {
    for name in ["seq2seq-rfa", "seq2seq-arc-cosine", "seq2seq-elu", "seq2seq-softmax"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures-seq2seq").join(name);
        let decoder = checkpoint::load(&folder, &Device::Cpu).unwrap();
        let golden = candle_core::safetensors::load(folder.join("golden.safetensors"), &Device::Cpu).unwrap();
        let ids =
            |key: String| -> Vec<u32> { golden[&key].to_dtype(candle_core::DType::U32).unwrap().to_vec1().unwrap() };
        let mut pool = decoder.new_pool(2).unwrap();
        for case in 0..3 {
            let (source, target) = (ids(format!("{case}.source")), ids(format!("{case}.target")));
            let want = flat(&golden[&format!("{case}.logits")]);
            assert!(want.iter().any(|v| v.abs() > 0.5), "{name}: the golden logits are nearly constant");
            decoder.read_source(&source, &mut pool, 1).unwrap();
            compare_sources(name, decoder.config(), &pool.export(1).unwrap(), &golden, case);
            let error = distance(&flat(&decoder.forward(&row(&target), &mut pool, &[1]).unwrap()), &want);
            assert!(error < TOLERANCE, "{name}, case {case}: {error}");
            compare_own(name, decoder.config(), &pool.export(1).unwrap(), &golden, case);
            assert_eq!(pool.tokens(1), (source.len() + target.len()) as u64);
        }
    }
}

#[test]
fn a_translation_is_the_same_in_any_pieces_batch_and_number_of_threads() {
    for (name, decoder) in both() {
        for kind in [StateType::F32, StateType::Bf16] {
            let mut numbers = Numbers::new(3);
            let sources: Vec<_> = [7, 290, 1].map(|len| numbers.ids(len, 61)).into();
            let target = numbers.ids(50, 61);
            let alone: Vec<Vec<f32>> = sources
                .iter()
                .map(|source| {
                    let mut pool = pool(&decoder, 2, kind);
                    decoder.read_source(source, &mut pool, 1).unwrap();
                    flat(&decoder.forward(&row(&target), &mut pool, &[1]).unwrap())
                })
                .collect();
            assert!(distance(&alone[0], &alone[1]) > 0.1, "{name}: the source has no effect");

            let options = PoolOptions { state: kind, threads: Threads::new(3).into(), ..PoolOptions::new(4) };
            let mut pool = decoder.new_pool_with(options).unwrap();
            for (slot, source) in sources.iter().enumerate() {
                // The slot's old contents must have no effect.
                decoder.read_source(&target, &mut pool, slot).unwrap();
                decoder.prefill(&target[..9], &mut pool, slot).unwrap();
                decoder.read_source(source, &mut pool, slot).unwrap();
                decoder.prefill(&target[..=slot * 5], &mut pool, slot).unwrap();
            }
            for slot in 0..3 {
                decoder.prefill(&target[slot * 5 + 1..20], &mut pool, slot).unwrap();
            }
            for (t, &id) in target.iter().enumerate().skip(20) {
                let logits = decoder.decode(&[id; 3], &mut pool, &[0, 1, 2]).unwrap();
                for (own, alone) in logits.chunks_exact(61).zip(&alone) {
                    assert_eq!(bits(own), bits(&alone[t * 61..][..61]), "{name} {kind:?}: token {t}");
                }
            }
        }
    }
}

#[test]
fn threads_change_no_bit_of_wide_layers() {
    // Wide and long enough that cross attention and the encoder are split among the threads.
    let wide = r#", "hidden_size": 64, "num_attention_heads": 8, "head_dim": 64, "proj_dim": 64"#;
    for more in ["", SOFTMAX] {
        let decoder = written(&config(&format!("{SOURCE}{wide}{more}")), 5);
        let mut numbers = Numbers::new(6);
        let (source, target) = (numbers.ids(280, 61), numbers.ids(30, 61));
        let read = |threads: usize| {
            let options = PoolOptions { threads: Threads::new(threads).into(), ..PoolOptions::new(3) };
            let mut pool = decoder.new_pool_with(options).unwrap();
            for slot in 0..3 {
                decoder.read_source(&source[slot * 7..], &mut pool, slot).unwrap();
                decoder.prefill(&target[slot..], &mut pool, slot).unwrap();
            }
            let logits = decoder.decode(&[1, 2, 3], &mut pool, &[0, 1, 2]).unwrap();
            (bits(&logits), [0, 1, 2].map(|slot| state(&pool, slot)))
        };
        assert_eq!(read(3), read(1), "{more}");
    }
}

#[test]
fn cross_attention_counts_its_denominators_except_in_a_probe() {
    let [(_, decoder), _] = both();
    let mut pool = decoder.new_pool(1).unwrap();
    decoder.read_source(&[3, 4, 5], &mut pool, 0).unwrap();
    decoder.forward_probed(&row(&[1, 2]), &mut pool, &[0], &mut Vec::new()).unwrap();
    assert_eq!(pool.denominators().all, 0);
    decoder.prefill(&[1, 2], &mut pool, 0).unwrap();
    // 2 tokens, 2 layers, 2 heads, self and cross attention.
    assert_eq!(pool.denominators().all, 2 * 2 * 2 * 2);
}

#[test]
fn a_translation_moves_to_another_slot_and_pool() {
    for (name, decoder) in both() {
        for kind in [StateType::F32, StateType::Bf16] {
            let mut numbers = Numbers::new(8);
            let (source, target) = (numbers.ids(33, 61), numbers.ids(60, 61));
            let (mut here, mut there) = (pool(&decoder, 2, kind), pool(&decoder, 3, kind));
            decoder.read_source(&source, &mut here, 0).unwrap();
            decoder.read_source(&numbers.ids(290, 61), &mut there, 2).unwrap();
            for read in [0, 1, 45] {
                decoder.read_source(&source, &mut here, 0).unwrap();
                if read > 0 {
                    decoder.prefill(&target[..read], &mut here, 0).unwrap();
                }
                let tokens = here.tokens(0);
                there.import(2, &here.export(0).unwrap(), tokens).unwrap();
                assert_eq!(state(&there, 2), state(&here, 0), "{name} {kind:?} {read}");
                let want = decoder.prefill_logits(&target[read..], &mut here, 0).unwrap();
                let got = decoder.prefill_logits(&target[read..], &mut there, 2).unwrap();
                assert_eq!(bits(&got), bits(&want), "{name} {kind:?} {read}");
            }
            here.reset(0).unwrap();
            there.import(2, &here.export(0).unwrap(), 0).unwrap();
            assert_eq!(there.tokens(2), 0);
            assert!(decoder.decode(&[1], &mut there, &[2]).is_err(), "{name}: an empty slot has no source");
        }
    }
}

#[test]
fn a_slot_of_random_features_has_one_size_whatever_the_source() {
    let layouts = [300, 60_000].map(|most| {
        let extra = SOURCE.replace("300", &most.to_string());
        [config(&extra).state_layout().numbers(), config(&format!("{extra}{SOFTMAX}")).state_layout().numbers()]
    });
    assert_eq!(layouts[0][0], layouts[1][0]);
    assert!(layouts[1][1] > 100 * layouts[0][1]);
}

#[test]
fn invalid_sources_and_texts_are_refused_and_change_nothing() {
    let ((_, decoder), alone) = (
        {
            let [rfa, _] = both();
            rfa
        },
        crate::common::decoder("", 3),
    );
    let mut pool = decoder.new_pool(2).unwrap();
    let refused = |outcome: Result<(), ModelError>, words: &[&str]| {
        let error = outcome.unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}: {words:?}");
    };
    refused(decoder.prefill(&[3], &mut pool, 0), &["slot 0", "no source"]);
    decoder.read_source(&[4, 5], &mut pool, 0).unwrap();
    decoder.prefill(&[1, 6], &mut pool, 0).unwrap();
    let before = state(&pool, 0);
    refused(decoder.read_source(&[], &mut pool, 0), &["1 to 300", "0"]);
    refused(decoder.read_source(&[3; 301], &mut pool, 0), &["1 to 300", "301"]);
    refused(decoder.read_source(&[3, 61], &mut pool, 0), &["61", "vocabulary"]);
    refused(decoder.read_source(&[3], &mut pool, 2), &["slot 2"]);
    let whole = pool.export(0).unwrap();
    for c in [1e30, -1.0, 1.0, f32::NAN] {
        let mut numbers = whole.clone();
        let last = numbers.len() - 2;
        numbers[last] = c;
        refused(pool.import(0, &numbers, 4), &["c of the source", "layer 1, head 1", "2 tokens"]);
    }
    let mut numbers = whole;
    for count in [3.5, -1.0, 0.0, 301.0, 5.0, f32::NAN] {
        *numbers.last_mut().unwrap() = count;
        refused(pool.import(0, &numbers, 4), &["source", "1 to 4"]);
    }
    assert_eq!((state(&pool, 0), pool.tokens(0)), (before, 4));
    let mut other = alone.new_pool(1).unwrap();
    refused(alone.read_source(&[1], &mut other, 0), &["decoder alone"]);
    refused(decoder.read_source(&[1], &mut other, 0), &["pool", "of this decoder"]);
    refused(decoder.prefill(&[1], &mut other, 0), &["pool", "of this decoder"]);
}

#[test]
fn a_config_out_of_its_bounds_is_refused_by_name() {
    let refused = |more: &str, words: &[&str]| {
        let base = r#"{"model_type": "rfa_seq2seq", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40,
            "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8, "proj_dim": 12, "encoder_layers": 2,
            "max_source_positions": 300, "decoder_start_token_id": 1}"#;
        let mut json: serde_json::Value = serde_json::from_str(base).unwrap();
        let more: serde_json::Value = serde_json::from_str(more).unwrap();
        more.as_object().unwrap().iter().for_each(|(key, value)| json[key] = value.clone());
        let error = DecoderConfig::from_json(&json.to_string()).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}: {words:?}");
    };
    refused(r#"{"model_type": "rfa_gate"}"#, &["encoder_layers", "absent", "2"]);
    refused(
        r#"{"model_type": "rfa_gate", "encoder_layers": null, "max_source_positions": null}"#,
        &["decoder_start_token_id", "absent"],
    );
    refused(r#"{"model_type": "llama"}"#, &["model_type", "rfa_gate", "rfa_seq2seq", "llama"]);
    refused(r#"{"encoder_layers": 0}"#, &["encoder_layers", "1", "1024"]);
    refused(r#"{"encoder_layers": null}"#, &["encoder_layers", "none"]);
    refused(r#"{"max_source_positions": 65537}"#, &["max_source_positions", "65536"]);
    refused(r#"{"decoder_start_token_id": 61}"#, &["decoder_start_token_id", "60", "61"]);
    refused(r#"{"decoder_start_token_id": null}"#, &["decoder_start_token_id", "none"]);
    refused(r#"{"attention": "hybrid", "sliding_window": 4}"#, &["attention", "rfa or softmax", "hybrid"]);
    refused(r#"{"feature_map": "favor"}"#, &["feature_map", "gaussian, arc_cosine or elu", "favor"]);
    refused(r#"{"cross_proj_dim": 0}"#, &["cross_proj_dim", "between 1 and 4096", "0"]);
    refused(
        r#"{"feature_map": "elu", "proj_dim": 0, "cross_proj_dim": 8}"#,
        &["cross_proj_dim", "absent without random vectors", "8"],
    );
    refused(
        r#"{"model_type": "rfa_gate", "encoder_layers": null, "max_source_positions": null,
            "decoder_start_token_id": null, "cross_proj_dim": 8}"#,
        &["cross_proj_dim", "absent where model_type is rfa_gate", "8"],
    );
    refused(r#"{"output_norm": true}"#, &["output_norm", "false"]);
    refused(r#"{"head_dim": 7}"#, &["head_dim", "even", "7"]);
}

#[test]
fn a_checkpoint_without_its_encoder_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let of = config(SOURCE);
    crate::common::write_checkpoint(folder.path(), &of, 3);
    assert_eq!(
        checkpoint::tensors(&of).values().map(|shape| shape.iter().product::<usize>() as u64).sum::<u64>(),
        of.parameters() + (of.num_hidden_layers * 2 * of.num_attention_heads * of.proj_dim * of.head_dim) as u64
    );
    let mut plain = of;
    (plain.encoder_layers, plain.max_source_positions, plain.decoder_start_token_id) = (None, None, None);
    plain.model_type = "rfa_gate".into();
    std::fs::write(folder.path().join("config.json"), serde_json::to_string(&plain).unwrap()).unwrap();
    let error = checkpoint::load(folder.path(), &Device::Cpu).unwrap_err().to_string();
    assert!(error.contains("unknown tensor encoder.layers.0.input_layernorm.weight"), "{error}");
    assert!(error.contains("unknown tensor model.layers.1.cross_attn.sigma"), "{error}");
}
