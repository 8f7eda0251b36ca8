//! Models from a hub: downloads, the cache, and what a hub must not be able to do.

mod native;
mod refused;
mod serve;
mod server;
mod walkthrough;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use serde_json::Value;
use tempfile::TempDir;

use server::{COMMIT, Files, Hub, Reply};

const WEIGHTS: &str = "model.safetensors";

/// Returns whether an environment variable could affect a download.
fn is_setting(name: &str) -> bool {
    let name = name.to_uppercase();
    ["HF_", "HUGGING", "TIDEGATE_", "TRANSFORMERS_"].iter().any(|start| name.starts_with(start))
        || name.ends_with("_PROXY")
        || name == "XDG_CACHE_HOME"
}

/// Returns a `tidegate` command that uses this hub, with `home` as `HF_HOME`.
fn tidegate(home: &Path, address: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_setting)) {
        command.env_remove(name);
    }
    command.current_dir(home).env("HF_HOME", home).env("HF_ENDPOINT", format!("http://{address}")).stdin(Stdio::null());
    command
}

/// A folder used as `HF_HOME`, and a hub.
struct Place {
    home: TempDir,
    hub: Hub,
}

impl Place {
    fn new(hub: Hub) -> Self {
        Self { home: tempfile::tempdir().unwrap(), hub }
    }

    fn command(&self) -> Command {
        tidegate(self.home.path(), &self.hub.address)
    }

    fn pull(&self, model: &str, variables: &[(&str, &str)]) -> Output {
        self.command().args(["pull", model]).envs(variables.iter().copied()).output().unwrap()
    }

    /// Pulls a model and returns the path that the command prints.
    fn pulled(&self, model: &str) -> PathBuf {
        let output = self.pull(model, &[]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        PathBuf::from(text(&output.stdout).trim_end())
    }

    /// Returns the error of a pull that must fail.
    fn refused(&self, model: &str, variables: &[(&str, &str)]) -> String {
        let output = self.pull(model, variables);
        let (stdout, log) = (text(&output.stdout), text(&output.stderr));
        assert!(!output.status.success() && stdout.is_empty(), "{model} was pulled: {stdout}");
        let error = log.lines().last().unwrap_or_default().to_owned();
        assert!(error.starts_with("error: "), "{log}");
        error
    }

    fn model(&self) -> PathBuf {
        self.home.path().join("hub/models--org--tiny")
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_model_is_pulled_into_the_cache_of_python_and_is_not_pulled_again() {
    let files = Files::tiny().with("README.md", "about").with("pytorch_model.bin", "more weights");
    let place = Place::new(Hub::start(files.clone()));
    let path = place.pulled("org/tiny");
    assert_eq!(path, place.model().join("snapshots").join(COMMIT));
    assert_eq!(std::fs::read_to_string(place.model().join("refs/main")).unwrap(), COMMIT);
    for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS] {
        let target = std::fs::read_link(path.join(name)).unwrap();
        assert_eq!(target.to_str().unwrap(), format!("../../blobs/{}", files.id(name)));
        assert_eq!(std::fs::read(path.join(name)).unwrap(), files.0[name]);
    }
    assert_eq!(std::fs::read_dir(&path).unwrap().count(), 5, "nothing else is downloaded");
    let asked = place.hub.asked();
    assert_eq!(asked[0].path, "/api/models/org/tiny/revision/main?blobs=true");
    assert!(asked.last().unwrap().path.ends_with(WEIGHTS), "weights are last: {asked:?}");

    assert_eq!(place.pulled("org/tiny"), path);
    assert_eq!(place.pulled("org/tiny@v1"), path);
    let more: Vec<String> = place.hub.asked()[asked.len()..].iter().map(|asked| asked.path.clone()).collect();
    let revision = |name: &str| format!("/api/models/org/tiny/revision/{name}?blobs=true");
    assert_eq!(more, [revision("main"), revision("v1")], "only the newest commits are asked for");
}

#[test]
fn a_commit_in_the_cache_and_a_cache_without_a_network_ask_nobody() {
    let place = Place::new(Hub::start(Files::tiny()));
    let missing = place.refused("org/tiny", &[("HF_HUB_OFFLINE", "1")]);
    assert!(missing.contains("org/tiny: not in the cache") && missing.contains("HF_HUB_OFFLINE"), "{missing}");
    assert!(place.hub.asked().is_empty());
    let path = place.pulled("org/tiny");
    let asked = place.hub.asked().len();
    assert_eq!(place.pulled(&format!("org/tiny@{COMMIT}")), path);
    let wrong = [("HF_HUB_OFFLINE", "1"), ("HF_ENDPOINT", "no address"), ("HF_TOKEN", "no token")];
    assert!(place.pull("org/tiny", &wrong).status.success());
    assert!(place.command().arg("models").envs(wrong).output().unwrap().status.success());
    assert!(place.refused("org/tiny", &wrong[1..]).contains("HF_ENDPOINT must be an address"));
    assert_eq!(place.hub.asked().len(), asked);

    // If the hub cannot be reached, a branch's model from the cache is used, with a warning.
    let gone = tidegate(place.home.path(), "127.0.0.1:1").args(["pull", "org/tiny"]).output().unwrap();
    assert_eq!(text(&gone.stdout).trim_end(), path.to_str().unwrap());
    assert!(text(&gone.stderr).contains("using org/tiny as it is in the cache"), "{}", text(&gone.stderr));

    std::fs::remove_file(path.join(WEIGHTS).canonicalize().unwrap()).unwrap();
    let missing = place.refused("org/tiny", &[("HF_HUB_OFFLINE", "1")]);
    assert!(missing.contains("not in the cache"), "an incomplete model is not used: {missing}");
    let asked = place.hub.asked().len();
    assert_eq!(place.pulled(&format!("org/tiny@{COMMIT}")), path);
    let more = place.hub.asked().split_off(asked);
    assert_eq!(more.len(), 2, "the listing and the weights: {more:?}");
}

#[test]
fn a_download_goes_on_where_it_was_cut_off() {
    let cuts = AtomicUsize::new(0);
    let hub = Hub::changed(Files::tiny(), move |asked, mut reply| {
        if asked.path.ends_with(WEIGHTS) && cuts.fetch_add(1, Ordering::SeqCst) < 2 {
            reply.cut = Some(10_000);
        }
        reply
    });
    let place = Place::new(hub);
    place.pulled("org/tiny");
    let ranges: Vec<_> =
        place.hub.asked_for(WEIGHTS).iter().map(|asked| asked.header("range").map(str::to_owned)).collect();
    assert_eq!(ranges, [None, Some("bytes=10000-".into()), Some("bytes=20000-".into())]);
}

#[test]
fn the_next_start_goes_on_also_with_a_hub_that_knows_no_ranges() {
    let files = Files::tiny();
    let fails = std::sync::Arc::new(AtomicBool::new(true));
    let (is_failing, weights) = (std::sync::Arc::clone(&fails), files.0[WEIGHTS].clone());
    let hub = Hub::changed(files.clone(), move |asked, mut reply| {
        if asked.path.ends_with(WEIGHTS) {
            if is_failing.load(Ordering::SeqCst) {
                // Status 410 is a refusal, which is not retried.
                return Reply::status(410);
            }
            (reply.status, reply.body) = (200, weights.clone());
            reply.headers.clear();
        }
        reply
    });
    let place = Place::new(hub);
    let error = place.refused("org/tiny", &[]);
    assert!(error.contains("410 from http://") && error.ends_with("the hub refuses the request"), "{error}");
    let incomplete = place.model().join("blobs").join(format!("{}.incomplete", files.id(WEIGHTS)));
    // Wrong bytes left by an earlier process: the whole file replaces them.
    std::fs::write(&incomplete, vec![7; 5000]).unwrap();
    fails.store(false, Ordering::SeqCst);
    let path = place.pulled("org/tiny");
    assert_eq!(std::fs::read(path.join(WEIGHTS)).unwrap(), files.0[WEIGHTS]);
    assert_eq!(place.hub.asked_for(WEIGHTS)[1].header("range"), Some("bytes=5000-"));
    assert!(!incomplete.exists());
}

#[test]
fn a_file_with_another_digest_is_deleted() {
    let files = Files::tiny();
    let hub = Hub::changed(files.clone(), |asked, mut reply| {
        if asked.path.ends_with(WEIGHTS) {
            reply.body[40_000] ^= 1;
        }
        reply
    });
    let place = Place::new(hub);
    let error = place.refused("org/tiny", &[]);
    let expected = files.id(WEIGHTS);
    assert_eq!(
        error,
        format!("error: {WEIGHTS} of org/tiny arrived with another digest than {expected}, and was deleted: try again")
    );
    let blobs = place.model().join("blobs");
    assert!(!blobs.join(&expected).exists() && !blobs.join(format!("{expected}.incomplete")).exists());
    assert!(!place.model().join("refs/main").exists(), "an incomplete model has no revision");
}

#[test]
fn wrong_bytes_of_an_earlier_download_are_downloaded_again() {
    let files = Files::tiny();
    let place = Place::new(Hub::start(files.clone()));
    let blobs = place.model().join("blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    std::fs::write(blobs.join(format!("{}.incomplete", files.id(WEIGHTS))), vec![7; 5000]).unwrap();
    let path = place.pulled("org/tiny");
    assert_eq!(std::fs::read(path.join(WEIGHTS)).unwrap(), files.0[WEIGHTS]);
    let asked = place.hub.asked_for(WEIGHTS);
    let ranges: Vec<_> = asked.iter().map(|asked| asked.header("range")).collect();
    assert_eq!(ranges, [Some("bytes=5000-"), None]);
}

#[test]
fn a_file_that_another_process_replaces_is_not_kept() {
    let home = tempfile::tempdir().unwrap();
    let files = Files::tiny();
    let blobs = home.path().join("hub/models--org--tiny/blobs");
    let incomplete = blobs.join(format!("{}.incomplete", files.id(WEIGHTS)));
    let hub = Hub::changed(files.clone(), move |asked, reply| {
        if asked.path.ends_with(WEIGHTS) {
            // As another process does that starts over, on a file system without working locks.
            std::fs::remove_file(&incomplete).unwrap();
            std::fs::write(&incomplete, "other").unwrap();
        }
        reply
    });
    let place = Place { home, hub };
    let error = place.refused("org/tiny", &[]);
    assert!(error.contains("another process has replaced it"), "{error}");
    assert!(!blobs.join(files.id(WEIGHTS)).exists());
    assert_eq!(place.hub.asked_for(WEIGHTS).len(), 1);
}

#[test]
fn a_file_of_a_model_does_not_take_its_place() {
    let mut whole = b"GGUF\x03\0\0\0................general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0rwkv7".to_vec();
    whole.resize(10_000, 1);
    let place = Place::new(Hub::start(Files::tiny().with("a.gguf", whole.clone())));
    let file = place.pulled(&format!("org/tiny@{COMMIT}:a.gguf"));
    // The cache has only the file. The model's name means it only offline, when the hub cannot be asked.
    let name = format!("org/tiny@{COMMIT}");
    let offline = place.pull(&name, &[("HF_HUB_OFFLINE", "1")]);
    assert_eq!(text(&offline.stdout).trim_end(), file.to_str().unwrap());
    assert!(text(&offline.stderr).contains("a.gguf, the only model of org/tiny@"), "{}", text(&offline.stderr));
    assert_eq!(place.pulled(&name), file.parent().unwrap());

    // A newer file does not hide the folder of the older commit.
    place.pulled("org/tiny");
    let mut listing = Files::tiny().with("a.gguf", whole.clone()).listing();
    listing["sha"] = "f".repeat(40).into();
    let hub = Hub::changed(Files::tiny(), move |asked, reply| {
        let body = listing.to_string().into_bytes();
        if asked.path.starts_with("/api/") {
            return Reply { body, ..Reply::status(200) };
        }
        if asked.path.ends_with("a.gguf") { Reply { body: whole.clone(), ..Reply::status(200) } } else { reply }
    });
    let place = Place { hub, ..place };
    assert!(place.pulled("org/tiny:a.gguf").to_str().unwrap().contains(&"f".repeat(40)));
    let offline = place.pull("org/tiny", &[("HF_HUB_OFFLINE", "1")]);
    assert_eq!(text(&offline.stdout).trim_end(), file.parent().unwrap().to_str().unwrap());
}

#[test]
fn parts_of_weights_are_those_of_the_index() {
    let tiny = Files::tiny();
    let weights = tiny.0[WEIGHTS].clone();
    let index = |name: &str| format!(r#"{{"weight_map": {{"a": "{name}"}}}}"#);
    let mut files = tiny.with("model-00001-of-00001.safetensors", weights);
    files.0.remove(WEIGHTS);
    let good = files.clone().with("model.safetensors.index.json", index("model-00001-of-00001.safetensors"));
    let path = Place::new(Hub::start(good)).pulled("org/tiny");
    assert!(path.ends_with(COMMIT));
    for (name, words) in
        [("../../x.safetensors", "must name files of its folder"), ("x.safetensors", "x.safetensors is missing")]
    {
        let place = Place::new(Hub::start(files.clone().with("model.safetensors.index.json", index(name))));
        let error = place.refused("org/tiny", &[]);
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn a_gguf_file_is_pulled_alone() {
    let mut whole = b"GGUF\x03\0\0\0................general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0rwkv7".to_vec();
    whole.resize(10_000, 1);
    let files = Files::default().with("README.md", "about").with("q/a-Q8_0.gguf", whole.clone());
    let place = Place::new(Hub::start(files.clone()));
    let path = place.pulled("org/tiny");
    assert_eq!(path, place.model().join("snapshots").join(COMMIT).join("q/a-Q8_0.gguf"));
    assert_eq!(std::fs::read(&path).unwrap(), whole);
    let ranges: Vec<_> =
        place.hub.asked_for(".gguf").iter().map(|asked| asked.header("range").map(str::to_owned)).collect();
    assert_eq!(ranges, [Some("bytes=0-4095".into()), None], "its beginning is looked at first");
    for model in ["org/tiny", "org/tiny:q/a-Q8_0.gguf"] {
        let offline = place.pull(model, &[("HF_HUB_OFFLINE", "1")]);
        assert_eq!(text(&offline.stdout).trim_end(), path.to_str().unwrap());
    }
    // Of several files, only the named one is in the cache.
    let place = Place::new(Hub::start(files.with("b.gguf", whole)));
    assert!(place.pulled("org/tiny:b.gguf").ends_with("b.gguf"));
    let error = place.refused("org/tiny:q/a-Q8_0.gguf", &[("HF_HUB_OFFLINE", "1")]);
    assert!(error.contains("there is no q/a-Q8_0.gguf: b.gguf"), "{error}");
    let table = text(&place.command().arg("models").output().unwrap().stdout);
    assert!(table.contains("org/tiny:b.gguf") && table.contains("no: "), "{table}");
}

#[test]
fn the_cache_is_listed_with_what_can_be_served() {
    let place = Place::new(Hub::start(Files::tiny()));
    let list = |args: &[&str]| text(&place.command().arg("models").args(args).output().unwrap().stdout);
    assert!(list(&[]).starts_with("there are no models in "), "{}", list(&[]));
    place.pulled("org/tiny");
    // A model as Python leaves it after an interrupted download, and one of an unsupported kind.
    let other = |name: &str, config: &str| {
        let folder = place.home.path().join(format!("hub/models--org--{name}/snapshots/{COMMIT}"));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("config.json"), config).unwrap();
    };
    other("cut", &text(&Files::tiny().0["config.json"]));
    other("llama", r#"{"model_type": "llama"}"#);
    let table = list(&[]);
    let line = |start: &str| table.lines().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("{table}"));
    assert_eq!(line("NAME").split_whitespace().collect::<Vec<_>>(), ["NAME", "REVISION", "SIZE", "SERVED"]);
    assert!(line("org/tiny").contains("  main  ") && line("org/tiny").ends_with("  yes"), "{table}");
    assert!(line("org/cut").contains(&COMMIT[..12]) && line("org/cut").contains("no: there are no weights"), "{table}");
    assert!(line("org/llama").contains("no: model_type \"llama\" is not supported: its memory grows"), "{table}");
    let rows: Vec<Value> =
        list(&["--output", "json"]).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let size: usize = Files::tiny().0.values().map(Vec::len).sum();
    let tiny = rows.iter().find(|row| row["name"] == "org/tiny").unwrap();
    assert_eq!((&tiny["served"], &tiny["size"]), (&true.into(), &size.into()));
    assert_eq!((&tiny["commit"], &tiny["revisions"][0]), (&COMMIT.into(), &"main".into()));
    assert_eq!(rows.len(), 3);
}
