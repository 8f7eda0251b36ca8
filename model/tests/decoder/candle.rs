//! Tests models that candle computes: they agree with our own kernels where both exist, and the bits of a text depend
//! on the text alone, as with every mixer.

use std::path::Path;

use tempfile::TempDir;
use tidegate_model::candle::{CandleDecoder, CandlePool, Checkpoint, Config};
use tidegate_model::checkpoint::LoadError;
use tidegate_model::{Backend, Device, checkpoint};

use crate::common::{Numbers, bits, config, distance, fixtures, write_checkpoint};
use crate::published;

/// Config keys of the families that have our own kernels, in shapes that the candle backend supports.
const NATIVE: [&str; 6] = [
    "",
    r#", "conv_kernel": 4, "output_norm": true, "position_embedding": "rope", "tie_word_embeddings": true"#,
    r#", "feature_map": "arc_cosine", "gate": false"#,
    r#", "feature_map": "elu", "proj_dim": 0"#,
    r#", "model_type": "rwkv7", "decay_low_rank_dim": 8, "a_low_rank_dim": 6, "v_low_rank_dim": 4, "gate_low_rank_dim": 10,
        "hidden_size": 128, "head_dim": 64, "num_hidden_layers": 3"#,
    r#", "model_type": "mamba2", "hidden_size": 24, "intermediate_size": 48, "head_dim": 12, "num_attention_heads": 4,
        "state_size": 10, "n_groups": 2, "norm_groups": 1, "tie_word_embeddings": true"#,
];

fn load(folder: &Path) -> CandleDecoder {
    Checkpoint::open(folder).unwrap().decoder(&Device::Cpu).unwrap()
}

fn native(keys: &str, seed: u64) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path(), &config(keys), seed);
    folder
}

/// Writes a checkpoint of every family, and returns each with its name.
fn all() -> Vec<(String, TempDir)> {
    let ours = NATIVE.iter().map(|keys| ((*keys).to_owned(), native(keys, 3)));
    let theirs = published::FAMILIES.iter().map(|kind| ((*kind).to_owned(), published::written(kind, 61, 64, 3)));
    ours.chain(theirs).collect()
}

fn logits(decoder: &CandleDecoder, ids: &[u32], pool: &mut CandlePool, slot: usize) -> Vec<f32> {
    let mut logits = Vec::new();
    decoder.prefill_logits(ids, pool, slot, &mut logits).unwrap();
    logits
}

fn state(pool: &CandlePool, slot: usize) -> Vec<u32> {
    bits(&pool.export(slot).unwrap())
}

/// Reorders the state of one of our decoders as the candle backend stores it: matrices of RWKV-7 and Mamba-2 are
/// transposed, and each of RFA's sums is stored for all heads together.
fn in_their_order(config: &tidegate_model::DecoderConfig, numbers: &[f32]) -> Vec<f32> {
    let (layout, d) = (config.state_layout(), config.head_dim);
    let (memory, inputs) = numbers.split_at(layout.memory());
    let mut out = Vec::with_capacity(numbers.len());
    for layer in memory.chunks_exact(layout.heads * layout.head) {
        let heads = || layer.chunks_exact(layout.head);
        match config.features() {
            0 => {
                let rows = layout.head / d;
                out.extend(heads().flat_map(|s| (0..layout.head).map(move |i| s[i % rows * d + i / rows])));
            }
            features => {
                let (s, z) = (features * d, features * (d + 1));
                for part in [0..s, s..z, z..z + 1] {
                    out.extend(heads().flat_map(|head| &head[part.clone()]));
                }
            }
        }
    }
    out.extend(inputs);
    out
}

/// Logits agree to 1e-4. States agree to 1e-4, relative to their largest number if that is above 1.
#[test]
fn it_agrees_with_the_kernels_of_our_own() {
    for (seed, keys) in (40..).zip(NATIVE) {
        let folder = native(keys, seed);
        let (own, theirs) = (checkpoint::load(folder.path(), &Device::Cpu).unwrap(), load(folder.path()));
        let ids = Numbers::new(seed).ids(1000, 61);
        let (mut own_pool, mut their_pool) = (own.new_pool(1).unwrap(), theirs.new_pool(1, 1).unwrap());
        let mut read = 0;
        for after in [1, 10, 1000] {
            let want = own.prefill_logits(&ids[read..after], &mut own_pool, 0).unwrap();
            assert!(want.iter().any(|v| v.abs() > 0.1), "{keys}: the logits are nearly constant");
            let error = distance(&logits(&theirs, &ids[read..after], &mut their_pool, 0), &want);
            assert!(error < 1e-4, "{keys}: logits after {after} tokens: {error}");
            let want = in_their_order(own.config(), &own_pool.export(0).unwrap());
            let greatest = want.iter().fold(1.0, |most: f32, v| most.max(v.abs()));
            let error = distance(&their_pool.export(0).unwrap(), &want) / greatest;
            assert!(error < 1e-4, "{keys}: the state after {after} tokens: {error}");
            read = after;
        }
    }
}

#[test]
fn a_text_in_any_pieces_has_the_same_bits() {
    for (name, folder) in all() {
        let decoder = load(folder.path());
        let ids = Numbers::new(4).ids(40, 61);
        let mut pool = decoder.new_pool(3, 1).unwrap();
        let whole = logits(&decoder, &ids, &mut pool, 0);
        assert!(whole.iter().any(|v| v.abs() > 0.1), "{name}: the logits are nearly constant");
        let mut step = Vec::new();
        for &id in &ids {
            decoder.decode_into(&[id], &mut pool, &[1], &mut step).unwrap();
        }
        assert_eq!((bits(&step), state(&pool, 1)), (bits(&whole), state(&pool, 0)), "{name}");
        for cut in [1, 2, 3, 4, 5, 17, 39] {
            pool.reset(2).unwrap();
            assert!(pool.export(2).unwrap().iter().all(|&v| v == 0.0), "{name}");
            decoder.prefill(&ids[..cut], &mut pool, 2).unwrap();
            assert_eq!(bits(&logits(&decoder, &ids[cut..], &mut pool, 2)), bits(&whole), "{name}, cut at {cut}");
            assert_eq!((state(&pool, 2), pool.tokens(2)), (state(&pool, 0), 40), "{name}, cut at {cut}");
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_in_a_batch_and_with_any_number_of_threads() {
    for (name, folder) in all() {
        let (decoder, mut numbers) = (load(folder.path()), Numbers::new(8));
        let prompts = [1, 20, 3, 11].map(|len| numbers.ids(len, 61));
        let (steps, slots) = (numbers.ids(4 * 10, 61), [0, 2, 3, 5]);
        let mut pool = decoder.new_pool(6, 2).unwrap();
        for (prompt, slot) in prompts.iter().zip(slots) {
            decoder.prefill(prompt, &mut pool, slot).unwrap();
        }
        let mut together = vec![Vec::new(); 4];
        for ids in steps.chunks_exact(4) {
            let mut logits = Vec::new();
            decoder.decode_into(ids, &mut pool, &slots, &mut logits).unwrap();
            logits.chunks_exact(61).zip(&mut together).for_each(|(row, all)| all.extend(bits(row)));
        }
        for (i, prompt) in prompts.iter().enumerate() {
            for threads in [1, 3] {
                let (mut alone, mut found, mut logits) =
                    (decoder.new_pool(1, threads).unwrap(), Vec::new(), Vec::new());
                decoder.prefill(prompt, &mut alone, 0).unwrap();
                for ids in steps.chunks_exact(4) {
                    decoder.decode_into(&ids[i..=i], &mut alone, &[0], &mut logits).unwrap();
                    found.extend(bits(&logits));
                }
                assert!(found == together[i], "{name}: row {i}, {threads} threads");
                assert_eq!(state(&alone, 0), state(&pool, slots[i]), "{name}: row {i}, {threads} threads");
            }
        }
    }
}

#[test]
fn a_state_continues_in_another_pool_bit_for_bit() {
    for (name, folder) in all() {
        let decoder = load(folder.path());
        let ids = Numbers::new(9).ids(50, 61);
        // Lengths around that of the convolutions, and a longer one.
        for read in [1, 2, 3, 4, 5, 30] {
            let (mut here, mut there) = (decoder.new_pool(1, 1).unwrap(), decoder.new_pool(2, 1).unwrap());
            decoder.prefill(&ids[..read], &mut here, 0).unwrap();
            decoder.prefill(&ids, &mut there, 1).unwrap();
            let numbers = here.export(0).unwrap();
            assert_eq!(numbers.len(), here.layout().numbers(), "{name}");
            assert_eq!(numbers.len() * 4, here.state_bytes(), "{name}");
            there.import(1, &numbers, read as u64).unwrap();
            assert_eq!(state(&there, 1), bits(&numbers), "{name}");
            let stayed = logits(&decoder, &ids[read..], &mut here, 0);
            let moved = logits(&decoder, &ids[read..], &mut there, 1);
            assert_eq!((bits(&moved), state(&there, 1)), (bits(&stayed), state(&here, 0)), "{name}: {read} tokens");
            assert!(there.import(1, &numbers[1..], 3).is_err(), "{name}");
        }
    }
}

/// Prints the bits of every family's logits. The next test runs this with different numbers of candle's threads.
#[test]
#[ignore = "the next test runs it"]
fn print_bits() {
    for kind in published::FAMILIES {
        let folder = published::written(kind, 4096, 256, 5);
        let decoder = load(folder.path());
        let mut pool = decoder.new_pool(1, 2).unwrap();
        println!("= {:?}", bits(&logits(&decoder, &Numbers::new(1).ids(8, 4096), &mut pool, 0)));
    }
    let folder = native(NATIVE[1], 5);
    let decoder = load(folder.path());
    println!("= {:?}", bits(&logits(&decoder, &Numbers::new(1).ids(8, 61), &mut decoder.new_pool(1, 2).unwrap(), 0)));
}

#[test]
fn candles_own_threads_change_no_bit() {
    let run = |count: &str| {
        let mut test = std::process::Command::new(std::env::current_exe().unwrap());
        test.args(["--exact", "candle::print_bits", "--ignored", "--nocapture"]);
        test.env("RAYON_NUM_THREADS", count).env("CANDLE_NUM_THREADS", count);
        let out = String::from_utf8(test.output().unwrap().stdout).unwrap();
        out.lines().filter_map(|line| Some(line.split_once("= ")?.1.to_owned())).collect::<Vec<_>>()
    };
    let one = run("1");
    assert_eq!(one.len(), published::FAMILIES.len() + 1);
    assert!(run("2") == one && run("5") == one);
}

#[test]
fn what_candle_does_not_support_is_refused_by_name() {
    for (keys, words) in [
        (r#", "attention": "softmax", "sliding_window": 4"#, "attention must be rfa for the candle backend"),
        (r#", "feature_map": "favor""#, "feature_map must be gaussian, arc_cosine or elu for the candle backend"),
        (
            r#", "model_type": "rwkv7", "decay_low_rank_dim": 8, "a_low_rank_dim": 6, "v_low_rank_dim": 4,
                "gate_low_rank_dim": 10, "hidden_size": 32, "head_dim": 16"#,
            "head_dim must be 64 for the candle backend, found 16",
        ),
        (&NATIVE[4].replace(r#""num_hidden_layers": 3"#, r#""num_hidden_layers": 1"#), "num_hidden_layers must be at"),
        (&format!("{}, \"norm_eps\": 1e-6", NATIVE[4]), "norm_eps must be 1e-5"),
        (&NATIVE[5].replace(r#""norm_groups": 1"#, r#""norm_groups": 2"#), "norm_groups must be 1"),
        (&NATIVE[5].replace(r#", "tie_word_embeddings": true"#, ""), "tie_word_embeddings must be true"),
        (&format!("{}, \"conv_kernel\": 3", NATIVE[5]), "conv_kernel must be 4"),
        (&format!("{}, \"use_bias\": true", NATIVE[5]), "use_bias must be false"),
        (&format!("{}, \"use_conv_bias\": false", NATIVE[5]), "use_conv_bias must be true"),
        (&format!("{}, \"time_step_limit\": [0.0, 0.5]", NATIVE[5]), "time_step_limit must be [0, Infinity]"),
        (&format!("{}, \"layer_norm_epsilon\": 1e-6", NATIVE[5]), "layer_norm_epsilon must be 1e-5"),
    ] {
        let error = Config::of(&config(keys)).unwrap_err().to_string();
        assert!(error.contains(words), "{keys}: {error}");
    }
    for (kind, key, value, words) in [
        ("mamba", "state_size", "32", "state_size must be 16 for the candle backend, found 32"),
        ("mamba", "conv_kernel", "3", "conv_kernel must be 4"),
        ("mamba", "intermediate_size", "96", "intermediate_size must be 128"),
        ("mamba", "time_step_rank", "8", "time_step_rank must be 4"),
        ("mamba", "use_bias", "true", "use_bias must be false"),
        ("mamba", "tie_word_embeddings", "false", "tie_word_embeddings must be true"),
        ("mamba", "layer_norm_epsilon", "1e-6", "layer_norm_epsilon must be 0.00001"),
        ("mamba", "ssm_cfg", r#"{"d_state": 8}"#, "ssm_cfg must be without \"d_state\", found 8"),
        ("mamba", "hidden_size", "0", "hidden_size must be between 1 and"),
        ("mamba", "vocab_size", "\"all\"", "vocab_size must be between 1 and"),
        ("mamba", "eos_token_id", "61", "eos_token_id must be between 0 and 60"),
        ("recurrent_gemma", "head_dim", "8", "head_dim must be 16 for the candle backend, found 8"),
        ("recurrent_gemma", "num_attention_heads", "6", "num_attention_heads must be a divisor of hidden_size (64)"),
        (
            "recurrent_gemma",
            "num_key_value_heads",
            "3",
            "num_key_value_heads must be a divisor of num_attention_heads (4)",
        ),
        ("recurrent_gemma", "lru_width", "50", "lru_width must be a multiple of num_attention_heads (4)"),
        ("recurrent_gemma", "intermediate_size", "81", "intermediate_size must be even"),
        ("recurrent_gemma", "hidden_activation", "\"relu\"", "hidden_activation must be \"gelu_pytorch_tanh\""),
        ("recurrent_gemma", "_block_types", "[]", "_block_types must be a list of"),
        ("recurrent_gemma", "_block_types", "[\"mamba\"]", "block_types must be a list of"),
        ("recurrent_gemma", "attention_window_size", "0", "attention_window_size must be between 1 and"),
        ("recurrent_gemma", "attention_bias", "1", "attention_bias must be true or false"),
        ("recurrent_gemma", "partial_rotary_factor", "1.0", "partial_rotary_factor must be 0.5"),
        ("recurrent_gemma", "rope_parameters", r#"{"rope_type": "yarn"}"#, "rope_type must be \"default\""),
        ("recurrent_gemma", "rope_parameters", r#"{"type": "linear"}"#, "type must be \"default\""),
        ("recurrent_gemma", "rope_parameters", "[]", "rope_parameters must be an object"),
        ("recurrent_gemma", "rope_scaling", r#"{"type": "linear"}"#, "rope_scaling must be null"),
        ("recurrent_gemma", "embeddings_scale_by_sqrt_dim", "false", "embeddings_scale_by_sqrt_dim must be true"),
        ("recurrent_gemma", "block_types", r#"["attention"]"#, "as _block_types is, found [\"attention\"]"),
        ("recurrent_gemma", "sliding_window", "8", "attention_window_size must be 8, as sliding_window is, found 16"),
        ("recurrent_gemma", "logits_soft_cap", "null", "logits_soft_cap must be a number"),
        ("recurrent_gemma", "logits_soft_cap", "0", "logits_soft_cap must be between 1 and"),
        ("rwkv5", "head_size", "48", "head_size must be a divisor of hidden_size (64)"),
        ("rwkv5", "attention_hidden_size", "32", "attention_hidden_size must be 64"),
        ("rwkv6", "head_size_divisor", "4", "head_size_divisor must be 8"),
        ("rwkv6", "layer_norm_epsilon", "2", "layer_norm_epsilon must be between"),
        ("rwkv6", "eos_token_id", "\"end\"", "eos_token_id must be a token id"),
    ] {
        let mut keys = published::config(kind, 61, 64);
        assert!(Config::from_json(&keys.to_string()).is_ok());
        keys[key] = serde_json::from_str(value).unwrap();
        let error = Config::from_json(&keys.to_string()).unwrap_err().to_string();
        assert!(error.contains(words), "{kind}, {key}: {error}");
    }
}

#[test]
fn missing_misshapen_and_unknown_tensors_are_listed_in_one_error() {
    for kind in published::FAMILIES {
        let keys = published::config(kind, 61, 64);
        let whole = published::tensors(&keys);
        let folder = tempfile::tempdir().unwrap();
        let problems = |tensors: &published::Tensors| {
            published::write(folder.path(), &keys, tensors, 1);
            let decoder = Checkpoint::open(folder.path()).unwrap().decoder(&Device::Cpu);
            let LoadError::Tensors { problems, .. } = decoder.unwrap_err() else { panic!("{kind}: another error") };
            problems
        };
        for i in 0..whole.len() {
            let mut tensors = whole.clone();
            let (missing, _) = tensors.remove(i);
            let (misshapen, shape) = tensors.last_mut().unwrap();
            let misshapen = misshapen.clone();
            shape[0] += 1;
            tensors.push(("other.weight".into(), vec![2]));
            let found = problems(&tensors);
            let named = |start: &str, name: &str| {
                found.iter().filter(|problem| problem.starts_with(start) && problem.contains(name)).count()
            };
            let each = [
                named("missing tensor ", &missing),
                named(&format!("{misshapen} has shape"), ""),
                named("unknown tensor other.weight", ""),
            ];
            assert_eq!((each, found.len()), ([1; 3], 3), "{missing}: {found:?}");
        }
        // A copy of a tied embedding is accepted, but no other head.
        published::write(folder.path(), &keys, &whole, 1);
        let file = folder.path().join("model.safetensors");
        let mut copied = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
        copied.insert("lm_head.weight".into(), copied[&whole[0].0].clone());
        candle_core::safetensors::save(&copied, &file).unwrap();
        Checkpoint::open(folder.path()).unwrap().decoder(&Device::Cpu).unwrap();
        let head = ("lm_head.weight".into(), vec![61, 64]);
        assert_eq!(problems(&[&whole[..], &[head]].concat()), ["unknown tensor lm_head.weight"]);
        // Tensors of these shapes do not fit in memory.
        let mut keys = keys.clone();
        keys["vocab_size"] = (1 << 22).into();
        keys["hidden_size"] = (1 << 16).into();
        keys["attention_hidden_size"] = (1 << 16).into();
        keys["head_dim"] = (1 << 14).into();
        for key in ["intermediate_size", "time_step_rank"] {
            keys.as_object_mut().unwrap().remove(key);
        }
        if kind == "recurrent_gemma" {
            keys["intermediate_size"] = (1 << 18).into();
        }
        published::write(folder.path(), &keys, &whole, 1);
        let error = Checkpoint::open(folder.path()).unwrap().decoder(&Device::Cpu).unwrap_err().to_string();
        assert!(error.contains("expected [4194304, 65536]"), "{error}");
    }
    // Only our own kernels support quantized weights.
    let folder = native("", 1);
    std::fs::rename(folder.path().join("model.safetensors"), folder.path().join("x")).unwrap();
    let quantised = fixtures().join("../../../weights/tests/fixtures/tiny-q8_0");
    let error = Checkpoint::open(&quantised).unwrap().decoder(&Device::Cpu).unwrap_err().to_string();
    assert!(error.contains("has dtype q8_0, expected f32, f16 or bf16"), "{error}");
}

/// The package `mamba_ssm` has its own config keys and its own name for the embedding, which it pads with unused rows.
#[test]
fn the_layout_of_the_package_is_read() {
    let keys = published::config("mamba", 64, 64);
    let mut tensors = published::tensors(&keys);
    let (folder, package) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    published::write(folder.path(), &keys, &tensors, 2);
    tensors[0].0 = "backbone.embedding.weight".into();
    let keys = serde_json::json!({"d_model": 64, "n_layer": 2, "vocab_size": 61, "ssm_cfg": {}, "rms_norm": true,
        "residual_in_fp32": true, "fused_add_norm": true, "pad_vocab_size_multiple": 8});
    published::write(package.path(), &keys, &tensors, 2);
    let ids = [3, 1, 60, 2];
    let [want, found] = [folder.path(), package.path()].map(|folder| {
        let decoder = load(folder);
        assert_eq!((decoder.vocab_size(), decoder.eos()), (64, &[0][..]));
        bits(&logits(&decoder, &ids, &mut decoder.new_pool(1, 1).unwrap(), 0))
    });
    assert_eq!(found, want);
}
