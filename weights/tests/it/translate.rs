//! Translation: each line is translated as if alone, and invalid lines are reported before any is translated.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::{ENDS, MOST, fixture, seq2seq, softmax, weights};
use serde_json::json;
use tidegate_model::Device;
use tidegate_weights::eval::Checkpoint;
use tidegate_weights::translate::{Sources, TranslateOptions, TranslationStats, translate};

const LINES: &str = "The river rose.\n\n She had 27 eggs.\t\nA heron stepped aside, gravely\r\nNo\nTwo boats, one oar.\n\
                     The river rose.\nIn the night it rained.\n?\nWho was it?\nShe.\nA letter, at last\n27\nx y z\n\
                     the\nOf boats";

fn load(folder: &Path) -> Checkpoint {
    Checkpoint::load(folder, &Device::Cpu).unwrap()
}

fn run(checkpoint: &Checkpoint, text: &str, batch: usize, max_tokens: usize) -> (Vec<String>, TranslationStats) {
    let sources = Sources::new(checkpoint, text).unwrap();
    let (mut lines, mut seen) = (Vec::new(), Vec::new());
    let mut write = |line: &str| {
        lines.push(line.to_owned());
        Ok(())
    };
    let mut progress = |done: &TranslationStats| seen.push((done.tokens, done.sentences));
    let options = TranslateOptions { batch, max_tokens };
    let done = translate(checkpoint, &sources, options, &mut write, &mut progress).unwrap();
    assert!(seen.is_sorted() && seen.last().is_none_or(|last| *last == (done.tokens, done.sentences)));
    assert_eq!((lines.len(), done.sentences), (sources.len(), sources.len() as u64));
    (lines, done)
}

/// Translates one source in its own pool, token by token.
fn by_hand(checkpoint: &Checkpoint, line: &str, max_tokens: usize) -> (Vec<u32>, String) {
    let (decoder, tokenizer) = (&checkpoint.decoder, &checkpoint.tokenizer);
    let mut ids = vec![0];
    ids.extend(tokenizer.encode(line.trim(), false).unwrap().get_ids());
    let mut pool = decoder.new_pool(1).unwrap();
    decoder.read_source(&ids, &mut pool, 0).unwrap();
    let (mut next, mut written) = (0, Vec::new());
    while written.len() < max_tokens {
        let logits = decoder.decode(&[next], &mut pool, &[0]).unwrap();
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        next = logits.iter().position(|&logit| logit == most).unwrap() as u32;
        if (next as usize).is_multiple_of(ENDS) {
            break;
        }
        written.push(next);
    }
    let text = tokenizer.decode(&written, true).unwrap();
    (written, text.trim().replace(['\n', '\r'], " "))
}

#[test]
fn no_translation_depends_on_the_batch() {
    for keys in [json!({}), softmax()] {
        let folder = seq2seq(&keys);
        let checkpoint = load(folder.path());
        let (ids, want): (Vec<_>, Vec<_>) = LINES.split('\n').map(|line| by_hand(&checkpoint, line, 30)).unzip();
        let mut lengths: Vec<usize> = ids.iter().map(Vec::len).collect();
        lengths.sort_unstable();
        lengths.dedup();
        assert!(lengths.len() > 3, "rows must end at different steps: {lengths:?}");
        assert_eq!(want[0], want[6], "one line, one translation");
        let tokens: usize = ids.iter().map(|ids| (ids.len() + 1).min(30)).sum();
        for batch in [1, 2, 3, 5, 9, 64] {
            let (lines, done) = run(&checkpoint, LINES, batch, 30);
            assert_eq!(lines, want, "{keys}, batch {batch}");
            assert_eq!(done.tokens, tokens as u64, "{keys}, batch {batch}");
            assert_eq!(done.cut, ids.iter().filter(|ids| ids.len() == 30).count() as u64);
        }
    }
}

#[test]
fn translations_without_an_end_are_cut() {
    let folder = seq2seq(&json!({"eos_token_id": 0}));
    let checkpoint = load(folder.path());
    let (_, done) = run(&checkpoint, LINES, 4, 7);
    assert!(done.cut > 0 && done.tokens <= 16 * 7, "{done:?}");
    let (lines, done) = run(&checkpoint, LINES, 4, 1);
    assert_eq!((lines.len(), done.tokens), (16, 16));
}

#[test]
fn an_empty_line_is_a_source_and_an_empty_text_has_none() {
    let folder = seq2seq(&json!({}));
    let checkpoint = load(folder.path());
    let of = |text: &str| run(&checkpoint, text, 2, 20);
    assert_eq!(of("").0.len(), 0);
    assert_eq!(of("\n").0, [by_hand(&checkpoint, "", 20).1]);
    assert_eq!(of("\n").1.source_tokens, 1);
    assert_eq!(of("a\n\n").0, of("a\n").0.into_iter().chain(of("\n").0).collect::<Vec<_>>());
}

#[test]
fn errors_name_the_invalid_line() {
    let folder = seq2seq(&json!({}));
    let checkpoint = load(folder.path());
    let error = |checkpoint: &Checkpoint, text: &str| Sources::new(checkpoint, text).unwrap_err().to_string();
    let long = "?".repeat(MOST);
    let message = error(&checkpoint, &format!("a\nb\n{long}\n{long}{long}"));
    assert_eq!(
        message,
        format!("line 3: must have at most {MOST} tokens including its first mark, found {}", MOST + 1)
    );
    assert_eq!(Sources::new(&checkpoint, &long[1..]).unwrap().len(), 1);
    assert_eq!(error(&checkpoint, "a\nb <|endoftext|> c"), "line 2: must not contain the mark <|endoftext|>");
    let message = error(&load(&fixture()), "a");
    assert!(message.contains("cannot translate") && message.contains("rfa_seq2seq"), "{message}");
}

#[test]
fn the_command_writes_only_translations_to_stdout() {
    let folder = seq2seq(&json!({}));
    let (model, checkpoint) = (folder.path().display().to_string(), load(folder.path()));
    let want: Vec<String> = LINES.split('\n').map(|line| by_hand(&checkpoint, line, 30).1).collect();
    let want = want.join("\n") + "\n";
    let place = tempfile::tempdir().unwrap();
    let [source, out] = ["source", "out"].map(|name| place.path().join(name).display().to_string());
    std::fs::write(&source, format!("{LINES}\n")).unwrap();

    let arguments = ["translate", "--model", &model, "--source", &source, "--max-tokens", "30"];
    let to_stdout = weights(&arguments);
    assert_eq!(String::from_utf8(to_stdout.stdout).unwrap(), want);
    let told = String::from_utf8(to_stdout.stderr).unwrap();
    for part in ["sentences", "16\n", "tokens/s of decode steps", "tokens/s of the whole", "seconds"] {
        assert!(told.contains(part), "{part} is not in\n{told}");
    }
    let to_file = weights(&[&arguments[..], &["--out", &out, "--batch", "2"]].concat());
    assert!(to_file.status.success() && to_file.stdout.is_empty());
    assert_eq!(std::fs::read_to_string(&out).unwrap(), want);

    let mut child = Command::new(env!("CARGO_BIN_EXE_tidegate-weights"))
        .args(["translate", "--model", &model, "--max-tokens", "30"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(LINES.as_bytes()).unwrap();
    assert_eq!(String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap(), want);

    // An invalid line leaves the old output file unchanged.
    std::fs::write(&source, format!("a\n{}", "?".repeat(MOST))).unwrap();
    let refused = weights(&["translate", "--model", &model, "--source", &source, "--out", &out]);
    assert!(!refused.status.success() && refused.stdout.is_empty());
    assert!(String::from_utf8(refused.stderr).unwrap().contains("line 2: must have at most 24 tokens"));
    assert_eq!(std::fs::read_to_string(&out).unwrap(), want);
    std::fs::write(&source, b"a\xff").unwrap();
    let refused = weights(&["translate", "--model", &model, "--source", &source]);
    assert!(String::from_utf8(refused.stderr).unwrap().contains("UTF-8"));
}

#[test]
fn commands_that_read_a_text_alone_refuse_an_encoder_decoder() {
    let folder = seq2seq(&json!({}));
    let place = tempfile::tempdir().unwrap();
    let model = folder.path().display().to_string();
    let text = fixture().join("plain.txt").display().to_string();
    let out = place.path().join("out").display().to_string();
    for arguments in [&["eval"][..], &["inspect"], &["quantize", "--to", "q8_0", "--out", &out]] {
        let refused = weights(&[arguments, &["--model", &model, "--text", &text]].concat());
        assert!(!refused.status.success() && refused.stdout.is_empty(), "{arguments:?}");
        let message = String::from_utf8(refused.stderr).unwrap();
        assert!(message.contains("an encoder-decoder cannot be evaluated on a text alone"), "{arguments:?}: {message}");
    }
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
}
