//! Tests RWKV-7 as its author publishes it, in a `.pth` or safetensors file without a config: it gives the same bits as
//! a folder with a config, and broken or malicious files are refused.
//!
//! `tests/fixtures-rwkv7/package.pth` is written by PyTorch (`weights/training/tidegate_training/rwkv7_fixture.py`).

use std::collections::HashMap;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use candle_core::Tensor;
use tidegate_model::Device;
use tidegate_model::checkpoint::{self, FileKind, Stored};

use crate::common::{self, Numbers, bits, flat};
use crate::pth::{self, Floats, archive};

/// Tensors that the first layer does not use, because no earlier layer has values to mix in. The package requires them.
const UNUSED: [&str; 3] = ["blocks.0.att.v0", "blocks.0.att.v1", "blocks.0.att.v2"];

type Tensors = HashMap<String, Tensor>;

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures-rwkv7/package.pth")
}

/// Returns the tensors of the fixture as candle reads them.
fn tensors() -> Tensors {
    candle_core::pickle::read_all(fixture()).unwrap().into_iter().collect()
}

/// Writes the model of the fixture as a folder in the layout of Hugging Face.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let parts = [
        ("emb.", "model.embeddings."),
        ("ln_out.", "model.norm."),
        ("head.", "lm_head."),
        ("blocks.", "model.layers."),
        (".ln0.", ".pre_norm."),
        (".ln1.", ".attn_norm."),
        (".ln2.", ".ffn_norm."),
        (".att.", ".attn."),
        ("receptance.", "r_proj."),
        ("attn.key.", "attn.k_proj."),
        ("attn.value.", "attn.v_proj."),
        ("output.", "o_proj."),
        ("ln_x.", "g_norm."),
    ];
    let mut out = Tensors::new();
    for (name, mut tensor) in tensors().into_iter().filter(|(name, _)| !UNUSED.contains(&name.as_str())) {
        let mut name = parts.iter().fold(name, |name, (theirs, ours)| name.replace(theirs, ours));
        let vector = tensor.dims().iter().product::<usize>();
        let low_rank = name.rsplit_once("attn.").and_then(|(_, part)| part.split_at_checked(1));
        if let Some((part @ ("w" | "a" | "v" | "g"), number @ ("0" | "1" | "2"))) = low_rank {
            let end = ["2.bias", "0.weight", "2.weight"][number.parse::<usize>().unwrap()];
            let start = name[..name.len() - 2].to_owned();
            tensor = if number == "0" { tensor.reshape(vector) } else { tensor.t().unwrap().contiguous() }.unwrap();
            name = format!("{start}{part}_lora.lora.{end}");
        } else if name.ends_with(".k_k") || name.ends_with(".k_a") || name.ends_with("ffn.x_k") {
            tensor = tensor.reshape(vector).unwrap();
        }
        out.insert(name, tensor);
    }
    candle_core::safetensors::save(&out, folder.path().join("model.safetensors")).unwrap();
    let config = r#"{"model_type": "rwkv7", "vocab_size": 272, "hidden_size": 64, "intermediate_size": 64, "head_dim": 64,
        "num_hidden_layers": 2, "decay_low_rank_dim": 16, "a_low_rank_dim": 12, "v_low_rank_dim": 8,
        "gate_low_rank_dim": 24, "bos_token_id": 0, "eos_token_id": 0}"#;
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    folder
}

fn logits(model: &Path) -> Vec<u32> {
    let decoder = checkpoint::load(model, &Device::Cpu).unwrap();
    let ids = Numbers::new(4).ids(200, decoder.config().vocab_size);
    bits(&decoder.prefill_logits(&ids, &mut decoder.new_pool(1).unwrap(), 0).unwrap())
}

/// Writes a file and returns its path.
fn written(place: &tempfile::TempDir, name: &str, bytes: &[u8]) -> PathBuf {
    let path = place.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

fn error(name: &str, bytes: &[u8]) -> String {
    let place = tempfile::tempdir().unwrap();
    let path = written(&place, name, bytes);
    let stored = Stored::open(&path).unwrap_err().to_string();
    assert_eq!(stored, checkpoint::load(&path, &Device::Cpu).unwrap_err().to_string());
    assert!(stored.starts_with(name), "{stored}");
    stored
}

#[test]
fn a_pth_has_the_bits_of_its_folder() {
    let folder = folder();
    assert_eq!(logits(&fixture()), logits(folder.path()));
    let (file, stored) = (Stored::open(&fixture()).unwrap(), Stored::open(folder.path()).unwrap());
    assert_eq!(file.config(), stored.config());
    assert!(file.tensors().eq(stored.tensors()));
    assert_eq!(FileKind::of(&fixture()).unwrap(), FileKind::Pth);
}

/// No two sizes are equal, so the test fails if two dimensions are confused or a matrix is transposed.
#[test]
fn a_model_of_sizes_that_all_differ_has_the_bits_of_its_folder() {
    let keys = r#", "model_type": "rwkv7", "vocab_size": 61, "hidden_size": 96, "intermediate_size": 80, "head_dim": 32,
        "num_hidden_layers": 2, "num_attention_heads": 3, "decay_low_rank_dim": 20, "a_low_rank_dim": 12,
        "v_low_rank_dim": 8, "gate_low_rank_dim": 28, "bos_token_id": 0, "eos_token_id": 0"#;
    let (config, folder, place) = (common::config(keys), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    common::write_checkpoint(folder.path(), &config, 6);
    let tensors = candle_core::safetensors::load(folder.path().join("model.safetensors"), &Device::Cpu).unwrap();
    let tensors = tensors.into_iter().map(|(name, tensor)| {
        let (shape, numbers) = (tensor.dims().to_vec(), flat(&tensor));
        Floats { name, shape, numbers }
    });
    let theirs = pth::as_published(tensors.collect());
    let pth = written(&place, "tiny.pth", &pth::file(&theirs));
    let safetensors = place.path().join("tiny.safetensors");
    let same = theirs.iter().map(|Floats { name, shape, numbers }| {
        (name.clone(), Tensor::from_slice(numbers, shape.as_slice(), &Device::Cpu).unwrap())
    });
    candle_core::safetensors::save(&same.collect::<Tensors>(), &safetensors).unwrap();
    let (want, stored) = (logits(folder.path()), Stored::open(folder.path()).unwrap());
    assert!(want.iter().any(|logit| f32::from_bits(*logit).abs() > 0.1), "nearly constant");
    for file in [pth, safetensors] {
        assert_eq!(logits(&file), want, "{}", file.display());
        let file = Stored::open(&file).unwrap();
        assert_eq!((file.config().low_ranks, file.config().head_dim), (config.low_ranks, 32));
        assert!(file.tensors().eq(stored.tensors()));
    }
    // A matrix with swapped dimensions has as many numbers as before, but no longer fits.
    for name in ["emb.weight", "blocks.0.att.r_k", "blocks.0.ffn.key.weight", "blocks.1.att.v1", "blocks.1.att.g2"] {
        let mut turned = theirs.clone();
        turned.iter_mut().find(|tensor| tensor.name == name).unwrap().shape.reverse();
        let found = error("tiny.pth", &pth::file(&turned));
        assert!(found.contains("does not fit RWKV-7"), "{name}: {found}");
    }
}

#[test]
fn safetensors_with_the_same_names_have_the_same_bits() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("rwkv7-g1.safetensors");
    candle_core::safetensors::save(&tensors(), &path).unwrap();
    assert_eq!(FileKind::of(&path).unwrap(), FileKind::Safetensors);
    assert_eq!(logits(&path), logits(&fixture()));
    // Newer files leave out the tensors that the first layer does not use.
    let fewer: Tensors = tensors().into_iter().filter(|(name, _)| !UNUSED.contains(&name.as_str())).collect();
    assert_eq!(fewer.len(), tensors().len() - 3);
    candle_core::safetensors::save(&fewer, &path).unwrap();
    assert_eq!(logits(&path), logits(&fixture()));
}

#[test]
fn tensors_that_do_not_fit_are_named_together_as_in_the_file() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("tiny.safetensors");
    let save = |tensors: &Tensors| {
        candle_core::safetensors::save(tensors, &path).unwrap();
        let error = Stored::open(&path).unwrap_err().to_string();
        error.lines().map(|line| line.trim().to_owned()).collect::<Vec<_>>()
    };
    let mut changed = tensors();
    changed.remove("blocks.1.ln2.bias");
    let narrow = changed["blocks.1.att.w1"].narrow(1, 0, 3).unwrap().contiguous().unwrap();
    changed.insert("blocks.1.att.w1".into(), narrow.clone());
    changed.insert("blocks.0.s_emb.weight".into(), narrow);
    let want = [
        "tiny.safetensors does not fit RWKV-7:",
        "blocks.1.att.w1 has shape [64, 3], expected [64, 16]",
        "missing tensor blocks.1.ln2.bias",
        "unknown tensor blocks.0.s_emb.weight",
    ];
    assert_eq!(save(&changed), want);
    // Sizes derived from shapes have the same bounds as those in a config.
    let mut changed = tensors();
    let short = changed["blocks.0.att.r_k"].reshape((8, 8)).unwrap();
    changed.insert("blocks.0.att.r_k".into(), short);
    let reason = "head_dim must be a multiple of 16 where model_type is rwkv7, found 8";
    assert_eq!(save(&changed), ["tiny.safetensors does not fit RWKV-7:", reason]);
    // The config is derived from these tensors.
    let mut changed = tensors();
    for name in ["emb.weight", "blocks.0.att.g1"] {
        changed.remove(name);
    }
    let flat = changed["blocks.0.att.r_k"].flatten_all().unwrap();
    changed.insert("blocks.0.att.r_k".into(), flat);
    let want = [
        "tiny.safetensors does not fit RWKV-7:",
        "missing tensor emb.weight",
        "blocks.0.att.r_k has shape [64], expected two dimensions",
        "missing tensor blocks.0.att.g1",
    ];
    assert_eq!(save(&changed), want);
}

#[test]
fn a_pth_cut_anywhere_is_refused() {
    let (bytes, place) = (std::fs::read(fixture()).unwrap(), tempfile::tempdir().unwrap());
    for length in (0..bytes.len()).step_by(311).chain([1, 2, 3, 4, 30, bytes.len() - 1]) {
        assert!(Stored::open(&written(&place, "tiny.pth", &bytes[..length])).is_err(), "{length}");
    }
}

#[test]
fn changed_bytes_of_a_pth_never_panic() {
    let (bytes, place) = (std::fs::read(fixture()).unwrap(), tempfile::tempdir().unwrap());
    let path = written(&place, "tiny.pth", &bytes);
    let mut stored = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    let mut put = |at: usize, part: &[u8]| {
        stored.seek(SeekFrom::Start(at as u64)).unwrap();
        stored.write_all(part).unwrap();
    };
    let directory = bytes.windows(4).position(|window| window == b"PK\x01\x02").unwrap();
    let pickle = bytes.windows(4).position(|window| window == b"data").unwrap();
    let mut refused = 0;
    for at in (0..pickle + 8000).chain(directory..bytes.len()) {
        let byte = [0, 0xff, bytes[at] ^ 0x80, bytes[at].wrapping_add(1)][at % 4];
        put(at, &[byte]);
        refused += u32::from(Stored::open(&path).is_err());
        put(at, &bytes[at..=at]);
    }
    assert!(refused > 2000, "{refused}");
    // Several numbers change at once.
    let mut numbers = Numbers::new(1);
    for round in 0..400 {
        let places: Vec<usize> =
            numbers.ids(3, bytes.len() - directory - 8).into_iter().map(|at| directory + at as usize).collect();
        for &at in &places {
            put(at, &[u64::MAX, 1 << 63, 1 << 40, 0, round][at % 5].to_le_bytes());
        }
        drop(Stored::open(&path));
        for &at in &places {
            put(at, &bytes[at..at + 8]);
        }
    }
    assert!(Stored::open(&path).is_ok());
}

/// Returns the error of a file with this pickle and a storage "0" of four bytes.
fn of_pickle(pickle: &[u8]) -> String {
    error("tiny.pth", &archive(&[("a/data.pkl", pickle, 0), ("a/data/0", &[0; 4], 0)]))
}

/// Returns a pickle of one float tensor, "emb.weight", with one dimension. The arguments are the number of elements in
/// its storage, the offset, the size and the stride.
fn tensor([numbers, offset, side, stride]: [u8; 4]) -> Vec<u8> {
    let name = b"}X\x0a\0\0\0emb.weightctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK";
    [
        &b"\x80\x02"[..],
        name,
        &[numbers, b't', b'Q', b'K', offset, b'K', side, 0x85, b'K', stride, 0x85],
        b"\x89Nt",
        b"Rs.",
    ]
    .concat()
}

#[test]
fn pickles_are_read_and_never_run() {
    for (pickle, reason) in [
        (&b"\x80\x02cos\nsystem\nX\x02\0\0\0ls\x85R."[..], "os.system is called, and pickles are not run"),
        (b"\x80\x02cbuiltins\neval\n)R.", "builtins.eval is called, and pickles are not run"),
        (b"\x80\x02)\x81.", "instruction 0x81 is not one that a file of tensors needs"),
        (b"(S'ls'\nios\nsystem\n.", "instruction 0x53 is not one"),
        (b"\x80\x02}", "the pickle has no end"),
        (b"\x80\x02N.", "the pickle must make a dictionary of tensors"),
        (b"\x80\x02.", "the pickle must make a dictionary of tensors"),
        (b"}X\xff\xff\xff\xffa", "ends too early"),
        (b"}\x8a\xff", "a number has 255 bytes, the maximum is 8"),
        (
            b"ctorch._utils\n_rebuild_tensor_v2\n)R.",
            "a tensor must have a storage, an offset, a shape and strides, of 8",
        ),
        (b"ctorch._utils\n_rebuild_parameter\n)R.", "a parameter must be a tensor"),
        (b"ctorch._utils\n_rebuild_parameter\nNR.", "a parameter must be a tensor"),
        (b"NNR.", "something that is no class is called"),
        (b"R.", "the stack has too few values"),
        (b"(R.", "the stack has too few values"),
        (b"(q\0.", "the stack has too few values"),
        (b"t.", "the stack has no mark"),
        (b"}(Nu.", "a name has no value"),
        (b"NNNs.", "only dictionaries may be filled"),
        (b"h\x07.", "the memo has no value 7"),
        (b"NQ.", "only storages of PyTorch may be outside the pickle"),
        (
            b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000NJ\xff\xff\xff\xfftQ.",
            "the size of a storage is negative",
        ),
        (b"}X\x01\0\0\0aNs.", "a must be a tensor"),
        (b"}K\x01K\x02s.", "names of tensors must be texts"),
        (b"}X\x01\0\0\0\xffNs.", "a text is not UTF-8"),
    ] {
        let found = of_pickle(pickle);
        assert!(found.contains(reason), "{found}\nexpected: {reason}");
    }
    for (numbers, reason) in [
        ([1, 0, 1, 1], "emb.weight has shape [1], expected two dimensions"),
        ([1, 0, 2, 1], "emb.weight lies outside its storage"),
        ([1, 1, 1, 1], "emb.weight lies outside its storage"),
        ([2, 0, 2, 1], "emb.weight lies outside its storage"),
        ([2, 0, 2, 2], "emb.weight must lie in one piece, row by row"),
    ] {
        let found = of_pickle(&tensor(numbers));
        assert!(found.contains(reason), "{found}\nexpected: {reason}");
    }
}

/// A reader that recursed into nested values would overflow its stack; one that copied values that each contain the
/// previous one twice would run out of memory.
#[test]
fn nested_values_cost_no_more_than_their_bytes() {
    let nested = [b"}X\x01\0\0\0aN".to_vec(), vec![0x85; 1 << 20], b"s.".to_vec()].concat();
    assert!(of_pickle(&nested).contains(": a must be a tensor"));
    let doubled = [b"}X\x01\0\0\0aN".to_vec(), b"q\0h\0\x86".repeat(1 << 19), b"s.".to_vec()].concat();
    assert!(of_pickle(&doubled).contains(": a must be a tensor"));
    // A shape of 10,000 dimensions that many tensors share.
    let shape = [&b"(("[..], &b"K\x01".repeat(10_000), b"tq\0"].concat();
    let storage = &b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000NK\x01tQ"[..];
    let arguments = [storage, b"K\x00", &shape[1..], b"h\0tq\x01"].concat();
    let calls = [&b"}ctorch._utils\n_rebuild_tensor_v2\nq\x02("[..], &arguments, &b"h\x02h\x01R".repeat(1 << 18), b"."]
        .concat();
    assert!(of_pickle(&calls).contains("of 8 dimensions at most"), "{}", of_pickle(&calls));
    assert!(of_pickle(&vec![b'N'; (1 << 22) + 1]).contains("data.pkl has 4194305 bytes, the maximum is 4194304"));
}

#[test]
fn archives_that_are_not_pytorchs_are_refused() {
    let good = tensor([1, 0, 1, 1]);
    for (files, reason) in [
        (&[("a/data.pkl", &good[..], 8), ("a/data/0", &[0; 4][..], 0)][..], "a/data.pkl must be stored as it is"),
        (&[("a/data.pkl", &good, 0)], "emb.weight: the archive has no file data/0"),
        (&[("a/data.pkl", &good, 0), ("a/data.pkl", &good, 0)], "a/data.pkl appears twice in the archive"),
        (&[("a/data.pkl", &good, 0), ("b/data.pkl", &good, 0)], "must have one data.pkl"),
        (&[("a/constants", &good, 0)], "must have one data.pkl"),
        (&[("a/data.pkl", &good, 0), ("a/byteorder", b"big", 0)], "must be little-endian"),
        (&[], "must have one data.pkl"),
    ] {
        let found = error("tiny.pth", &archive(files));
        assert!(found.contains(reason), "{found}\nexpected: {reason}");
    }
    let mut many = archive(&[("a/data.pkl", &good, 0)]);
    let end = many.len() - 22;
    many[end + 10..end + 12].copy_from_slice(&9u16.to_le_bytes());
    assert!(error("tiny.pth", &many).contains("has a broken directory: file 1"));
    // The zip64 record, with 64-bit counts, comes before the last record.
    let mut huge = archive(&[("a/data.pkl", &good, 0)]);
    let end = huge.split_off(huge.len() - 22);
    let (record, most) = (huge.len() as u64, u64::MAX.to_le_bytes());
    huge.extend(
        [b"PK\x06\x06", &[0; 28][..], &most, &most, &most, b"PK\x06\x07", &[0; 4], &record.to_le_bytes(), &[0; 4]]
            .concat(),
    );
    huge.extend([&end[..10], &[0xff; 10], &end[20..]].concat());
    assert!(error("tiny.pth", &huge).contains("has 18446744073709551615 files, the maximum is 65536"));
    assert!(error("tiny.pth", b"PK\x03\x04").contains("has no whole directory of files at its end"));
    assert!(error("tiny.pth", b"").contains("has no whole directory of files at its end"));
    let old = [&b"\x80\x02\x8a\x0al\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."[..], &[0; 99]].concat();
    assert!(error("tiny.pth", &old).contains("was written by PyTorch before 1.6"));
}
