//! Fuzzes model files that others write: GGUF with its values and tokenizer, `.pth` with a vocabulary file beside it,
//! and a folder with several safetensors files. A changed model is either refused or served. Nothing panics, and memory
//! stays within a multiple of the files' size.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use safetensors::SafeTensors;
use safetensors::tensor::serialize;
use serde_json::{Value as Json, json};
use stats_alloc::Region;
use tidegate_model::random::Normals;
use tidegate_model::{DecoderConfig, checkpoint};
use tidegate_server::checkpoint::{BackendChoice, DeviceChoice, OpenOptions, open};

use super::{ALLOCATOR, alone};
use crate::common::random::{WORDS, write_vocabulary};
use crate::common::{fuzz, pieces};
use crate::llamacpp::{self, F32, Gguf};
use crate::pth::{self, Floats};

/// Bytes that may be allocated for each byte of the files, plus a constant. Freed memory still counts.
const EACH: usize = 64;
const ANY: usize = 48 << 20;

/// Maximum time to load one of these small models.
const LONGEST: Duration = Duration::from_secs(20);

/// Strings to insert: counts of 4 and 8 bytes, numbers at the limits of types, and keywords of the formats.
const PARTS: [&str; 22] = [
    "\0\0\0\0\0\0\0\x01",
    "\0\0\0\x40\0\0\0\0",
    "\x7f\x7f\x7f\x7f\x7f\x7f\x7f\x7f",
    "\x09\0\0\0\x09\0\0\0",
    "\x08\0\0\0",
    "\0\0\0\0",
    "18446744073709551615",
    "-1",
    "1e99",
    "null",
    "[[[[",
    "\"F16\"",
    "\"data_offsets\":[0,4]",
    "\"\\ud800\"",
    "ctorch\nFloatStorage\n",
    "(t",
    "K\x01",
    "h\x01h\x01",
    "R",
    "PK\x01\x02",
    "\\x",
    "blk.1.",
];

/// Writes a part, possibly changed, and the rest of the model into a folder; returns the model's path.
type Write = Box<dyn Fn(&[u8], &Path) -> PathBuf>;

/// A part of a model's files that the fuzzer changes.
struct Part {
    what: &'static str,
    bytes: Vec<u8>,
    write: Write,
}

fn part(what: &'static str, bytes: Vec<u8>, write: impl Fn(&[u8], &Path) -> PathBuf + 'static) -> Part {
    Part { what, bytes, write: Box::new(write) }
}

fn put(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Returns random weights for a configuration.
fn weights(config: &DecoderConfig) -> Vec<Floats> {
    let mut normals = Normals::new(5);
    let tensors = checkpoint::tensors(config).into_iter().map(|(name, shape)| {
        let numbers = (0..shape.iter().product()).map(|_| 0.4 * normals.normal() as f32).collect();
        Floats { name, shape, numbers }
    });
    tensors.collect()
}

fn rwkv7() -> DecoderConfig {
    let config = json!({"model_type": "rwkv7", "vocab_size": 272, "hidden_size": 16, "intermediate_size": 24, "head_dim": 16,
        "num_hidden_layers": 2, "decay_low_rank_dim": 4, "a_low_rank_dim": 3, "v_low_rank_dim": 2,
        "gate_low_rank_dim": 5, "bos_token_id": 0, "eos_token_id": 0});
    DecoderConfig::from_json(&config.to_string()).unwrap()
}

fn mamba2() -> DecoderConfig {
    let config = json!({"model_type": "mamba2", "vocab_size": 280, "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16, "state_size": 8, "n_groups": 1, "conv_kernel": 4,
        "tie_word_embeddings": true, "bos_token_id": 0, "eos_token_id": 0});
    DecoderConfig::from_json(&config.to_string()).unwrap()
}

/// Converts weights into the form that [`llamacpp`] takes.
fn by_name(weights: Vec<Floats>) -> BTreeMap<String, llamacpp::Tensor> {
    let tensor = |tensor: Floats| (tensor.name, llamacpp::Tensor::floats(&tensor.shape, &tensor.numbers));
    weights.into_iter().map(tensor).collect()
}

fn gguf_of_rwkv7() -> Gguf {
    let single = (0..=u8::MAX).map(|byte| vec![byte]);
    let words = WORDS.iter().map(|word| word.as_bytes().to_vec());
    let tokens: Vec<Vec<u8>> = single.chain(words).chain([b"\xe2\x98".to_vec()]).collect();
    llamacpp::rwkv7(&rwkv7(), by_name(weights(&rwkv7())), &tokens)
}

/// Returns a Mamba-2 file with the tokens and merges of the fixture.
fn gguf_of_mamba2() -> Gguf {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures-mamba2-llamacpp/tokenizer.json");
    let tokenizer: Json = serde_json::from_slice(&std::fs::read(fixture).unwrap()).unwrap();
    llamacpp::mamba2_with(&mamba2(), by_name(weights(&mamba2())), &tokenizer)
}

/// Returns a Mamba-2 file with a tokenizer in the style of SentencePiece.
fn gguf_of_pieces() -> Gguf {
    let mut config = mamba2();
    config.vocab_size = pieces::VOCABULARY;
    llamacpp::mamba2_scored(&config, by_name(weights(&config)), &pieces::tokenizer(pieces::Space::Never))
}

/// Adds two parts: a whole GGUF file, and its header alone. After a changed header, the unchanged numbers follow at the
/// next aligned position.
fn of_gguf(file: &Gguf, parts: &mut Vec<Part>) {
    let bytes = file.bytes();
    assert!(file.tensors.iter().all(|(_, tensor)| tensor.kind == F32));
    let lengths = file.tensors.iter().map(|(_, tensor)| tensor.bytes.len());
    let last = file.tensors.last().unwrap().1.bytes.len();
    let numbers = lengths.map(|length| length.next_multiple_of(32)).sum::<usize>() - last.next_multiple_of(32) + last;
    let (header, numbers) = bytes.split_at(bytes.len() - numbers);
    let numbers = numbers.to_vec();
    parts.push(part("the header of a GGUF file", header.to_vec(), move |header, folder| {
        let mut bytes = header.to_vec();
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        put(folder, "tiny.gguf", &[bytes, numbers.clone()].concat())
    }));
    parts.push(part("a GGUF file", bytes, |bytes, folder| put(folder, "tiny.gguf", bytes)));
}

fn of_pth(parts: &mut Vec<Part>) {
    const VOCABULARY: &str = "rwkv_vocab_v20230424.txt";
    let tensors = pth::as_published(weights(&rwkv7()));
    let whole = pth::file(&tensors);
    let start = whole.windows(4).position(|window| window == b"PK\x01\x02").unwrap();
    let (files, directory) = whole.split_at(start);
    let (files, pickle, unchanged) = (files.to_vec(), pth::pickle(&tensors), whole.clone());
    let with_vocabulary = |bytes: &[u8], folder: &Path| {
        write_vocabulary(folder);
        put(folder, "tiny.pth", bytes)
    };
    parts.push(part("the directory of an archive", directory.to_vec(), move |directory, folder| {
        with_vocabulary(&[&files, directory].concat(), folder)
    }));
    parts.push(part("a pickle", pickle, move |pickle, folder| with_vocabulary(&pth::around(pickle, &tensors), folder)));
    let place = tempfile::tempdir().unwrap();
    write_vocabulary(place.path());
    let vocabulary = std::fs::read(place.path().join(VOCABULARY)).unwrap();
    parts.push(part("RWKV's vocabulary", vocabulary, move |vocabulary, folder| {
        put(folder, VOCABULARY, vocabulary);
        put(folder, "tiny.pth", &unchanged)
    }));
    parts.push(part("a .pth file", whole, with_vocabulary));
}

/// Adds the parts of a folder whose weights are in two files.
fn of_safetensors(parts: &mut Vec<Part>) {
    let pinned = Path::new(env!("CARGO_MANIFEST_DIR")).join("../weights/tests/fixtures/tiny");
    let whole = std::fs::read(pinned.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&whole).unwrap();
    let shard = |layer: bool| {
        let tensors = tensors.tensors().into_iter().filter(|(name, _)| name.contains("layers.1") == layer);
        serialize(tensors, None).unwrap()
    };
    let (first, second) = (shard(false), shard(true));
    let file = |name: &str| if name.contains("layers.1") { "two.safetensors" } else { "one.safetensors" };
    let map: BTreeMap<&str, &str> = tensors.names().into_iter().map(|name| (name, file(name))).collect();
    let index = json!({"metadata": {"total_size": 1}, "weight_map": map}).to_string().into_bytes();
    let mut files = vec![("one.safetensors", first), ("two.safetensors", second), (checkpoint::INDEX, index)];
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        files.push((name, std::fs::read(pinned.join(name)).unwrap()));
    }
    let write = |changed: &'static str, files: Vec<(&'static str, Vec<u8>)>| {
        move |bytes: &[u8], folder: &Path| {
            for (name, bytes) in &files {
                put(folder, name, bytes);
            }
            put(folder, changed, bytes);
            folder.to_owned()
        }
    };
    for (name, bytes) in &files {
        parts.push(part(name, bytes.clone(), write(name, files.clone())));
    }
    let (length, rest) = files[0].1.split_at(8);
    let (header, numbers) = rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
    let (numbers, whole) = (numbers.to_vec(), write("one.safetensors", files.clone()));
    parts.push(part("the header of safetensors", header.to_vec(), move |header, folder| {
        whole(&[&(header.len() as u64).to_le_bytes()[..], header, &numbers].concat(), folder)
    }));
}

fn length(folder: &Path) -> usize {
    std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().metadata().unwrap().len() as usize).sum()
}

/// Opens a model, encodes texts and stops its engine; returns whether the model could be opened.
fn serves(model: &Path) -> bool {
    let options = OpenOptions {
        slots: 1,
        prefix_bytes: 0,
        backend: BackendChoice::Native,
        device: DeviceChoice::Cpu,
        ..OpenOptions::default()
    };
    let Ok((served, thread)) = open(model, &options) else { return false };
    let vocab = served.limits.vocab_size as u32;
    for text in ["the river and the fox\n\n", "a\u{0}\u{2603}<|endoftext|>\u{1f980}"] {
        for ids in [served.tokenizer.encode(text), served.tokenizer.encode_more(text)].into_iter().flatten() {
            assert!(ids.iter().all(|&id| id < vocab), "{ids:?} in a vocabulary of {vocab}");
        }
    }
    served.engine.abort();
    thread.join();
    true
}

#[test]
fn fuzz_a_changed_model_is_refused_or_served() {
    static PANICS: AtomicUsize = AtomicUsize::new(0);

    let _alone = alone();
    let (before, here) = (std::panic::take_hook(), std::thread::current().id());
    // A caught panic on this thread becomes an error. A panic on another thread would go unnoticed, so it is counted.
    std::panic::set_hook(Box::new(move |info| {
        PANICS.fetch_add(usize::from(std::thread::current().id() != here), Ordering::SeqCst);
        before(info);
    }));
    let mut parts = Vec::new();
    of_gguf(&gguf_of_rwkv7(), &mut parts);
    of_gguf(&gguf_of_mamba2(), &mut parts);
    of_gguf(&gguf_of_pieces(), &mut parts);
    of_pth(&mut parts);
    of_safetensors(&mut parts);
    let seeds: Vec<Vec<u8>> = parts.iter().map(|part| part.bytes.clone()).collect();
    for Part { what, bytes, write } in &parts {
        let folder = tempfile::tempdir().unwrap();
        assert!(serves(&write(bytes, folder.path())), "{what}");
    }
    let (mut served, mut refused, mut greatest) = (0, 0, (0, ""));
    for fuzz::Input { number, seed, bytes } in fuzz::inputs_and_flips(&seeds, &PARTS) {
        let (Part { what, write, .. }, folder) = (&parts[seed], tempfile::tempdir().unwrap());
        let model = write(&bytes, folder.path());
        let (length, clock, region) = (length(folder.path()), Instant::now(), Region::new(ALLOCATOR));
        *(if serves(&model) { &mut served } else { &mut refused }) += 1;
        let taken = region.change().bytes_allocated;
        greatest = greatest.max((taken, what));
        assert!(taken < EACH * length + ANY, "input {number}, {what} of {length} bytes: {taken} bytes");
        assert!(clock.elapsed() < LONGEST, "input {number}, {what}: {:?}", clock.elapsed());
        assert_eq!(PANICS.load(Ordering::SeqCst), 0, "input {number}, {what}");
    }
    println!("{served} served, {refused} refused; {} bytes at most, for {}", greatest.0, greatest.1);
    assert!(served > 20 && refused > 20, "{served} served, {refused} refused");
}
