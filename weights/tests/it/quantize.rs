//! Quantizing: the copy equals quantizing at load time, is written completely or not at all, and describes itself.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use candle_core::quantized::gguf_file::Content;
use tidegate_model::checkpoint::{self, Stored};
use tidegate_model::{Device, WeightType};
use tidegate_weights::eval::Checkpoint;
use tidegate_weights::inspect::inspect;
use tidegate_weights::quantize::{Draft, QuantizeError, QuantizeOptions, QuantizeReport};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn quantize(to: WeightType, out: &Path) -> Result<QuantizeReport, QuantizeError> {
    Draft::write(&QuantizeOptions { model: &fixture("tiny"), to, out }, &mut |_| ())?.finish(None)
}

fn logits(decoder: &tidegate_model::Decoder) -> Vec<u32> {
    let logits = decoder.prefill_logits(&[0, 42, 7, 299, 100], &mut decoder.new_pool(1).unwrap(), 0).unwrap();
    logits.into_iter().map(f32::to_bits).collect()
}

/// Returns all names in a folder, sorted.
fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_copy_of_mamba_2_is_the_model_that_loading_as_its_type_gives() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures-mamba2");
    let place = tempfile::tempdir().unwrap();
    let (to, out) = (WeightType::Q8_0, place.path().join("small"));
    let draft = Draft::write(&QuantizeOptions { model: &model, to, out: &out }, &mut |_| ()).unwrap();
    let report = draft.finish(None).unwrap();
    let matrices: Vec<_> = report.matrices.iter().map(|matrix| matrix.name.as_str()).collect();
    assert_eq!(matrices, ["embeddings", "mixer.in_proj", "mixer.out_proj", "lm_head"]);
    let (got, want) = (checkpoint::load(&out, &Device::Cpu).unwrap(), checkpoint::load_as(&model, to).unwrap());
    let [got, want] = [got, want]
        .map(|decoder| decoder.prefill_logits(&[0, 42, 7, 96], &mut decoder.new_pool(1).unwrap(), 0).unwrap());
    assert_eq!(got, want);
}

#[test]
fn every_type_gives_the_model_that_loading_as_it_gives() {
    let place = tempfile::tempdir().unwrap();
    for to in WeightType::ALL {
        let out = place.path().join(to.name());
        let report = quantize(to, &out).unwrap();
        let (got, want) = (checkpoint::load(&out, &Device::Cpu).unwrap(), checkpoint::load_as(&fixture("tiny"), to));
        assert_eq!(logits(&got), logits(&want.unwrap()), "{to}");
        Checkpoint::load(&out, &Device::Cpu).unwrap();
        // Every other tensor is unchanged.
        let (old, new) = (Stored::open(&fixture("tiny")).unwrap(), Stored::open(&out).unwrap());
        for (old_tensor, new_tensor) in old.tensors().zip(new.tensors()) {
            assert_eq!((old_tensor.name, old_tensor.shape), (new_tensor.name, new_tensor.shape));
            if !old_tensor.quantised {
                assert_eq!(old_tensor, new_tensor);
                assert_eq!(old.floats(old_tensor.name).unwrap(), new.floats(new_tensor.name).unwrap());
            }
        }
        let groups: Vec<_> = inspect(&out).unwrap().groups.iter().map(|g| (g.name, g.bytes)).collect();
        assert_eq!(groups, report.groups.iter().map(|g| (g.name, g.after)).collect::<Vec<_>>());
    }
    assert_eq!(names(place.path()).len(), WeightType::ALL.len(), "nothing is left over");
}

#[test]
fn the_report_has_the_errors_and_the_f16_matrices() {
    let place = tempfile::tempdir().unwrap();
    let errors = |to| {
        let report = quantize(to, &place.path().join(format!("{to}"))).unwrap();
        let f16: Vec<_> = report.in_f16().map(|m| m.name.clone()).collect();
        (report.matrices.iter().map(|m| m.relative_error).fold(0.0, f64::max), f16, report)
    };
    let (error, f16, report) = errors(WeightType::Q8_0);
    assert!((0.002..0.01).contains(&error), "{error}");
    assert_eq!(f16, ["mlp.down_proj", "self_attn.o_proj"], "rows of 48 and of 16");
    assert!(report.matrices.iter().all(|m| m.tensors == if m.name == "embed_tokens" { 1 } else { 2 }));
    let old: u64 = Stored::open(&fixture("tiny")).unwrap().tensors().map(|tensor| tensor.bytes as u64).sum();
    assert_eq!(report.groups.iter().map(|g| g.before).sum::<u64>(), old);
    let (error, ..) = errors(WeightType::Q4_0);
    assert!((0.05..0.15).contains(&error), "{error}");
    let (error, f16, _) = errors(WeightType::Q4K);
    assert!(f16.len() == 8 && error < 1e-3, "no row has 256 numbers: {error}");
    assert_eq!(errors(WeightType::F32).0, 0.0);
}

#[test]
fn the_file_and_the_card_describe_themselves() {
    let place = tempfile::tempdir().unwrap();
    let out = place.path().join("small");
    quantize(WeightType::Q4_0, &out).unwrap();
    let content = Content::read(&mut std::fs::File::open(out.join("model.gguf")).unwrap()).unwrap();
    let text = |key: &str| content.metadata[key].to_string().unwrap().clone();
    let number = |key: &str| content.metadata[key].to_u32().unwrap();
    assert_eq!((text("general.architecture"), text("general.name")), ("rfagate".into(), "tiny".into()));
    assert_eq!((number("general.file_type"), number("general.quantization_version")), (2, 2));
    let files = ["README.md", "config.json", "generation_config.json", "model.gguf", "tokenizer.json"];
    assert_eq!(names(&out), [&files[..], &["tokenizer_config.json"]].concat());
    for name in ["config.json", "tokenizer.json"] {
        assert_eq!(std::fs::read(out.join(name)).unwrap(), std::fs::read(fixture("tiny").join(name)).unwrap());
    }
    let card = std::fs::read_to_string(out.join("README.md")).unwrap();
    assert!(card.starts_with("# small\n\n## Quantised\n"), "{card}");
    assert!(card.contains("quantize --model tiny --to q4_0 --out small\n"), "{card}");
}

#[test]
fn a_failure_leaves_no_files() {
    let place = tempfile::tempdir().unwrap();
    let out = place.path().join("out");
    let error = |model: &Path, out: &Path| {
        let options = QuantizeOptions { model, to: WeightType::Q8_0, out };
        let error = Draft::write(&options, &mut |_| ()).err().unwrap().to_string();
        assert!(!out.join("model.gguf").exists());
        error
    };
    let quantised = error(&fixture("tiny-q8_0"), &out);
    assert!(quantised.contains("tiny-q8_0/model.gguf is already quantised"), "{quantised}");
    let file = error(&fixture("tiny-q8_0").join("model.gguf"), &out);
    assert!(file.contains("tiny-q8_0/model.gguf is one file; start from a folder"), "{file}");
    assert!(error(&place.path().join("none"), &out).contains("config.json"));
    assert!(error(&fixture("tiny"), Path::new("/")).contains("new or empty folder"));

    // Numbers too large for f16, in a matrix whose rows are not a multiple of the block.
    let model = place.path().join("model");
    std::fs::create_dir(&model).unwrap();
    std::fs::copy(fixture("tiny").join("config.json"), model.join("config.json")).unwrap();
    let name = "model.layers.1.mlp.down_proj.weight";
    let mut tensors = candle_core::safetensors::load(fixture("tiny").join("model.safetensors"), &Device::Cpu).unwrap();
    let large = (tensors[name].ones_like().unwrap() * 1e6).unwrap();
    tensors.insert(name.into(), large);
    candle_core::safetensors::save(&tensors, model.join("model.safetensors")).unwrap();
    assert_eq!(error(&model, &out), format!("{name} has values that f16 cannot represent"));
    assert_eq!(names(place.path()), ["model"]);

    std::fs::create_dir(&out).unwrap();
    std::fs::write(out.join("mine"), "").unwrap();
    assert!(error(&fixture("tiny"), &out).contains("new or empty folder"));
    assert_eq!(names(&out), ["mine"]);
    #[cfg(unix)]
    {
        let (target, link) = (tempfile::tempdir().unwrap(), place.path().join("link"));
        std::os::unix::fs::symlink(target.path(), &link).unwrap();
        assert!(error(&fixture("tiny"), &link).contains("new or empty folder"), "a link cannot be replaced");
        std::fs::remove_file(link).unwrap();
    }
    std::fs::remove_file(out.join("mine")).unwrap();
    quantize(WeightType::Q8_0, &out).unwrap();
    let options = QuantizeOptions { model: &fixture("tiny"), to: WeightType::Q8_0, out: &place.path().join("dropped") };
    let draft = Draft::write(&options, &mut |_| ()).unwrap();
    assert!(draft.folder().join("model.gguf").exists());
    drop(draft);
    assert_eq!(names(place.path()), ["model", "out"]);
}

#[test]
fn licenses_and_templates_are_copied_and_leftovers_of_killed_runs_do_not_disturb() {
    let place = tempfile::tempdir().unwrap();
    let (model, out) = (place.path().join("model"), place.path().join("out"));
    std::fs::create_dir(&model).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture("tiny").join(name), model.join(name)).unwrap();
    }
    std::fs::write(model.join("LICENSE"), "yours").unwrap();
    let template = "additional_chat_templates/tool_use.jinja";
    std::fs::create_dir(model.join("additional_chat_templates")).unwrap();
    std::fs::write(model.join(template), "{{ tools }}").unwrap();
    // A model card in Latin-1.
    std::fs::write(model.join("README.md"), b"na\xefve").unwrap();
    let options = QuantizeOptions { model: &model, to: WeightType::Q8_0, out: &out };
    let killed = Draft::write(&options, &mut |_| ()).unwrap();
    let left = killed.folder().to_owned();
    std::mem::forget(killed);
    Draft::write(&options, &mut |_| ()).unwrap().finish(None).unwrap();
    assert_eq!(names(&out), ["LICENSE", "README.md", "additional_chat_templates", "config.json", "model.gguf"]);
    assert_eq!(std::fs::read_to_string(out.join(template)).unwrap(), "{{ tools }}");
    assert!(std::fs::read_to_string(out.join("README.md")).unwrap().contains("na\u{fffd}ve"));
    assert!(left.exists());
    assert_eq!(names(place.path()).len(), 3);
}

#[test]
fn the_written_file_equals_the_pinned_one() {
    let place = tempfile::tempdir().unwrap();
    let out = place.path().join("tiny-q8_0");
    quantize(WeightType::Q8_0, &out).unwrap();
    let [new, pinned] = [out, fixture("tiny-q8_0")].map(|folder| std::fs::read(folder.join("model.gguf")).unwrap());
    assert!(new == pinned);
}

fn weights(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate-weights"));
    command.args(arguments).env("TIDEGATE_MODEL", fixture("tiny")).env("RUST_BACKTRACE", "0").output().unwrap()
}

#[test]
fn the_command_scores_the_text_before_and_after() {
    let place = tempfile::tempdir().unwrap();
    let out = place.path().join("small").display().to_string();
    let text = fixture("tiny").join("plain.txt").display().to_string();
    let arguments = ["quantize", "--to", "q4_0", "--out", &out, "--text", &text, "--limit", "200"];
    let table = String::from_utf8(weights(&arguments).stdout).unwrap();
    for part in ["bytes after", "relative error", "are not a multiple of", "200 tokens of plain.txt", "perplexity"] {
        assert!(table.contains(part), "{part} is not in\n{table}");
    }
    let card = std::fs::read_to_string(Path::new(&out).join("README.md")).unwrap();
    assert!(card.contains("--text plain.txt --limit 200\n") && card.contains("| perplexity |"), "{card}");

    let again = weights(&arguments);
    assert!(!again.status.success() && String::from_utf8(again.stderr).unwrap().contains("new or empty folder"));
    let other = place.path().join("other").display().to_string();
    let json = weights(&["quantize", "--to", "q8_0", "--out", &other, "--json"]).stdout;
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    assert_eq!((&json["to"], &json["matrices"][0]["stored_as"]), (&"q8_0".into(), &"q8_0".into()));
    assert!(json["on_text"].is_null());
    for wrong in ["f32", "q5_0"] {
        let out = weights(&["quantize", "--to", wrong, "--out", &other]);
        assert!(!out.status.success() && String::from_utf8(out.stderr).unwrap().contains("--to"));
    }
    let lost = place.path().join("lost").display().to_string();
    let out = weights(&["quantize", "--to", "q8_0", "--out", &lost, "--limit", "9"]);
    assert!(!out.status.success() && String::from_utf8(out.stderr).unwrap().contains("--text"));
    let out = weights(&["quantize", "--to", "q8_0", "--out", &lost, "--text", "/no/such/file"]);
    assert!(String::from_utf8(out.stderr).unwrap().contains("text: cannot open /no/such/file"));
    assert_eq!(names(place.path()), ["other", "small"]);
}

#[test]
fn rows_that_no_block_fits_are_named_before_anything_is_written() {
    let place = tempfile::tempdir().unwrap();
    let misfit = |to| {
        let options = QuantizeOptions { model: &fixture("tiny"), to, out: &place.path().join("none") };
        options.misfit().unwrap()
    };
    let q4_k = misfit(WeightType::Q4K).unwrap();
    let (kind, bytes) = q4_k.smaller.unwrap();
    assert_eq!((q4_k.matrices.len(), kind), (8, WeightType::Q4_0));
    assert!(q4_k.matrices.contains(&("mlp.down_proj".into(), 48)) && bytes < q4_k.bytes, "{q4_k:?}");
    let q4_0 = misfit(WeightType::Q4_0).unwrap();
    assert_eq!((q4_0.matrices.len(), q4_0.bytes, q4_0.smaller), (2, bytes, None), "rows of 48 and of 16");
    assert_eq!(misfit(WeightType::F16), None);

    // The written file has the announced bytes, and the command warns before it reads a text.
    for (to, announced) in [(WeightType::Q4K, q4_k.bytes), (WeightType::Q4_0, bytes)] {
        let out = place.path().join(to.name());
        quantize(to, &out).unwrap();
        let written: usize = Stored::open(&out).unwrap().tensors().filter(|t| t.quantised).map(|t| t.bytes).sum();
        assert_eq!(written as u64, announced, "{to}");
    }
    let out = place.path().join("lost").display().to_string();
    let failed = weights(&["quantize", "--to", "q4_k", "--out", &out, "--text", "/no/such/file"]);
    let said = String::from_utf8(failed.stderr).unwrap();
    let (warning, error) = said.split_once('\n').unwrap();
    assert!(
        warning.starts_with("warning: q4_k needs rows of a multiple of 256") && warning.contains("--to q4_0"),
        "{said}"
    );
    assert!(error.contains("/no/such/file"), "{said}");
}
