//! RWKV-7 as its author publishes it: `.pth` files without a vocabulary, which comes from another repository.

use std::path::{Path, PathBuf};

use super::server::{COMMIT, Files, Hub, VOCABULARY};
use super::{Place, text};

/// The repository whose vocabulary is used if none is named.
const DEFAULT: &str = "RWKV/RWKV7-Goose-World2.8-0.1B-HF";

/// Returns a `.pth` file written by PyTorch.
fn archive() -> Vec<u8> {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures-rwkv7");
    std::fs::read(fixtures.join("package.pth")).unwrap()
}

/// Returns the files of a repository as the author publishes it.
pub(super) fn pth() -> Files {
    Files::default().with("README.md", "about").with("a.pth", archive())
}

/// Starts a hub on which the default repository and `org/other` have the files `others`, and every other model
/// has `files`.
pub(super) fn beside(files: Files, others: Files) -> Hub {
    Hub::changed(files, move |asked, reply| {
        if asked.path.contains(DEFAULT) || asked.path.contains("org/other") { others.answer(asked) } else { reply }
    })
}

impl Place {
    /// Returns the requested paths, without those of the first `first` requests.
    fn asked_after(&self, first: usize) -> Vec<String> {
        self.hub.asked().into_iter().skip(first).map(|asked| asked.path).collect()
    }

    /// Returns the path of a model's only snapshot in the cache.
    fn snapshot(&self, model: &str) -> PathBuf {
        self.home.path().join(format!("hub/models--{}/snapshots/{COMMIT}", model.replace('/', "--")))
    }
}

const OFFLINE: (&str, &str) = ("HF_HUB_OFFLINE", "1");

#[test]
fn a_pth_is_pulled_with_the_vocabulary_of_another_model_and_both_are_used_without_a_network() {
    let place = Place::new(beside(pth(), Files::vocabulary()));
    let path = place.pulled("org/tiny:a.pth");
    assert_eq!(path, place.snapshot("org/tiny").join("a.pth"));
    assert_eq!(std::fs::read(&path).unwrap(), archive());
    assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "foreign files are in the snapshot");
    let vocabulary = place.snapshot(DEFAULT).join(VOCABULARY);
    assert_eq!(std::fs::read(vocabulary).unwrap(), Files::vocabulary().0[VOCABULARY]);
    let ranges: Vec<_> =
        place.hub.asked_for(".pth").iter().map(|asked| asked.header("range").map(str::to_owned)).collect();
    assert_eq!(ranges, [Some("bytes=0-65535".into()), None], "its beginning is looked at first");
    let asked = place.asked_after(0);
    assert!(asked.iter().position(|path| path.ends_with(VOCABULARY)) < Some(asked.len() - 1), "{asked:?}");

    // The vocabulary is not requested again. A model's name without a file means its only file.
    assert_eq!(place.pulled("org/tiny"), path);
    assert_eq!(place.asked_after(asked.len()), ["/api/models/org/tiny/revision/main?blobs=true"]);
    for model in ["org/tiny:a.pth", "org/tiny", &format!("org/tiny@{COMMIT}:a.pth")] {
        let offline = place.pull(model, &[OFFLINE]);
        assert_eq!(text(&offline.stdout).trim_end(), path.to_str().unwrap(), "{}", text(&offline.stderr));
    }
    let asked = place.hub.asked().len();
    // `--model` also takes the printed path: its vocabulary is in the cache.
    for model in ["org/tiny:a.pth", path.to_str().unwrap()] {
        let mut command = place.command();
        command.args(["generate", " the fox", "--model", model, "--device", "cpu", "-n", "2", "--ignore-eos"]);
        let output = command.env(OFFLINE.0, OFFLINE.1).output().unwrap();
        assert!(text(&output.stdout).starts_with(" the fox"), "{}", text(&output.stderr));
    }
    let table = text(&place.command().arg("models").output().unwrap().stdout);
    let line = |start: &str| table.lines().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("{table}"));
    assert!(line("org/tiny:a.pth").ends_with("  yes"), "{table}");
    assert!(line(DEFAULT).contains("no: it is RWKV's vocabulary alone"), "{table}");
    assert_eq!(place.hub.asked().len(), asked);
}

#[test]
fn the_vocabulary_is_the_repositorys_own_or_the_one_that_is_named() {
    let own = Place::new(beside(pth().with(VOCABULARY, Files::vocabulary().0[VOCABULARY].clone()), Files::default()));
    let path = own.pulled("org/tiny");
    assert!(path.with_file_name(VOCABULARY).exists() && own.asked_after(0).iter().all(|path| !path.contains(DEFAULT)));

    let pulled = |place: &Place, args: &[&str], variables: &[(&str, &str)]| {
        let mut command = place.command();
        let output = command.args(["pull", "org/tiny"]).args(args).envs(variables.iter().copied()).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        place.asked_after(0)
    };
    let named = [&["--rwkv-vocabulary", "org/other"][..], &["--rwkv-vocabulary=org/other@v1:rwkv_vocab_v20230424.txt"]];
    for args in named {
        let place = Place::new(beside(pth(), Files::vocabulary()));
        assert!(pulled(&place, args, &[]).iter().all(|path| !path.contains(DEFAULT)), "{args:?}");
        assert!(place.snapshot("org/other").join(VOCABULARY).exists());
    }
    let place = Place::new(beside(pth(), Files::default()));
    std::fs::write(place.home.path().join("mine.txt"), "").unwrap();
    let asked = pulled(&place, &[], &[("TIDEGATE_RWKV_VOCABULARY", "mine.txt")]);
    assert!(asked.iter().all(|path| path.contains("org/tiny")), "{asked:?}");
}

#[test]
fn a_vocabulary_that_is_missing_is_named_before_the_weights_are_downloaded() {
    let place = Place::new(beside(pth(), Files::tiny()));
    let start = "error: org/tiny:a.pth has no vocabulary of RWKV (rwkv_vocab_v*.txt), and none is found elsewhere: ";
    let error = place.refused("org/tiny:a.pth", &[]);
    assert_eq!(
        error,
        format!("{start}{DEFAULT}: there is no such file: name a file, or another repository, with --rwkv-vocabulary")
    );
    assert_eq!(place.hub.asked_for(".pth").len(), 1, "only its beginning");

    let place = Place::new(beside(pth(), Files::vocabulary()));
    place.pulled("org/tiny:a.pth");
    std::fs::remove_dir_all(place.home.path().join(format!("hub/models--{}", DEFAULT.replace('/', "--")))).unwrap();
    let error = place.refused("org/tiny:a.pth", &[OFFLINE]);
    assert!(error.starts_with(&format!("{start}{DEFAULT}: it is not in the cache")), "{error}");
    assert!(error.ends_with("and HF_HUB_OFFLINE forbids a download"), "{error}");
    // A model given by path asks no hub, and the error says what it needs.
    let (asked, path) = (place.hub.asked().len(), place.snapshot("org/tiny").join("a.pth"));
    let mut command = place.command();
    let output = command.args(["generate", "x", "--device", "cpu", "--model"]).arg(path).output().unwrap();
    assert!(text(&output.stderr).contains("must be in the same folder, or be named"), "{}", text(&output.stderr));
    assert_eq!(place.hub.asked().len(), asked);
}

#[test]
fn what_cannot_be_meant_or_served_is_refused() {
    let place = Place::new(beside(pth().with("q/b.pth", archive()), Files::vocabulary()));
    let error = place.refused("org/tiny", &[]);
    assert!(error.ends_with("name one of the files with ORG/NAME:FILE: a.pth, q/b.pth"), "{error}");
    assert!(place.refused("org/tiny:README.md", &[]).contains("README.md is not a GGUF file, and not RWKV-7 as .pth"));

    let earlier = [&b"PK\x03\x04"[..], &[0; 26], b"x/data.pkl", b"blocks.0.att.time_decay", &vec![7; 100_000]].concat();
    let place = Place::new(beside(Files::default().with("x.pth", earlier), Files::vocabulary()));
    let error = place.refused("org/tiny", &[]);
    assert!(error.contains("x.pth is RWKV of a version before 7"), "{error}");
    assert_eq!(place.asked_after(1).len(), 1, "only its beginning is asked for");
}

#[test]
fn the_same_tensors_in_safetensors_are_pulled_if_they_are_named() {
    let tensors = b"\x20\0\0\0\0\0\0\0{\"blocks.0.att.r_k\":{}}          ";
    let place = Place::new(beside(Files::default().with("x.safetensors", &tensors[..]), Files::vocabulary()));
    assert!(place.pulled("org/tiny:x.safetensors").ends_with("x.safetensors"));
    assert!(place.snapshot(DEFAULT).join(VOCABULARY).exists());
    let table = text(&place.command().arg("models").output().unwrap().stdout);
    assert!(table.contains("org/tiny:x.safetensors "), "{table}");
}
