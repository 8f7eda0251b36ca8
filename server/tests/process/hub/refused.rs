//! What a hub must not be able to do, and what it refuses.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use super::server::{COMMIT, Files, Hub, Reply};
use super::{Place, WEIGHTS, text};

/// The token of these tests, which only the hub may see.
const TOKEN: (&str, &str) = ("HF_TOKEN", "hf_secret_tttttttttttttttttttttttttttttttt");

#[test]
fn a_token_is_sent_to_the_hub_and_not_to_where_it_redirects() {
    let other = Hub::start(Files::tiny());
    let address = other.address.clone();
    let hub = Hub::changed(Files::tiny(), move |asked, reply| {
        // As on Hugging Face: small files come from the hub, weights from another host at a secret, signed address.
        if asked.path.ends_with(WEIGHTS) {
            let to = format!("http://{address}{}?signature=secret", asked.path);
            return Reply::status(302).with("location", &to);
        }
        if asked.path.ends_with("tokenizer.json") && !asked.path.starts_with("/moved") {
            return Reply::status(307).with("location", &format!("/moved{}", asked.path));
        }
        reply
    });
    let place = Place::new(hub);
    for filter in ["trace", "trace,ureq::run=trace,ureq_proto=trace,ureq_proto::util=trace"] {
        let output = place.pull("org/tiny", &[TOKEN, ("TIDEGATE_LOG", filter)]);
        let log = text(&output.stderr);
        assert!(output.status.success() && log.contains("DEBUG"), "{log}");
        // A dump of the request shows sixteen bytes a row, so one row would have at least eight of the token's `t`.
        assert!(!log.contains("secret") && !log.contains("tttttttt"), "{filter}: {log}");
        std::fs::remove_dir_all(place.home.path().join("hub")).unwrap();
    }
    let asked = place.hub.asked();
    assert!(
        asked.iter().all(|asked| asked.header("authorization") == Some(format!("Bearer {}", TOKEN.1).as_str())),
        "{asked:?}"
    );
    assert!(asked.iter().any(|asked| asked.path.starts_with("/moved")), "{asked:?}");
    let elsewhere = other.asked();
    assert!(
        !elsewhere.is_empty() && elsewhere.iter().all(|asked| asked.header("authorization").is_none()),
        "{elsewhere:?}"
    );
}

#[test]
fn redirects_end() {
    let hub = Hub::changed(Files::tiny(), |asked, _| Reply::status(302).with("location", &asked.path));
    let place = Place::new(hub);
    let error = place.refused("org/tiny", &[]);
    assert!(error.contains("redirects more than 5 times"), "{error}");
    assert_eq!(place.hub.asked().len(), 6);
    for (to, words) in [("ftp://127.0.0.1/x", "which is not secure"), ("file:///etc/passwd", "which is not secure")] {
        let place = Place::new(Hub::changed(Files::tiny(), move |_, _| Reply::status(302).with("location", to)));
        let error = place.refused("org/tiny", &[]);
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn names_that_lead_out_of_the_cache_are_refused() {
    let good = Files::tiny().listing();
    for (change, words) in [
        (json!({"sha": "../../../x"}), "a commit must be 40 hexadecimal digits"),
        (
            json!({"siblings": [{"rfilename": "config.json", "size": 1, "blobId": "../../../x"}]}),
            "must be 40 hexadecimal",
        ),
        (json!({"siblings": [{"rfilename": "x", "lfs": {"sha256": "/etc/x", "size": 1}}]}), "a SHA-256 must be 64"),
        (json!({"siblings": 3}), "it is not a hub's JSON"),
    ] {
        let mut listing = good.clone();
        listing.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        let hub = Hub::changed(Files::tiny(), move |asked, reply| {
            let body = listing.to_string().into_bytes();
            if asked.path.starts_with("/api/") { Reply { body, ..Reply::status(200) } } else { reply }
        });
        let place = Place::new(hub);
        let error = place.refused("org/tiny", &[]);
        assert!(error.contains("the answer of http://") && error.contains(words), "{change}: {error}");
        assert_eq!(place.hub.asked().len(), 1, "nothing is asked after {change}");
        assert!(!place.home.path().join("hub").exists(), "something was written");
    }
}

#[test]
fn files_whose_names_lead_out_of_the_cache_are_left_out() {
    let files = ["../../x", "/x", "a/../../../x"].into_iter().fold(Files::tiny(), |files, name| files.with(name, "x"));
    let place = Place::new(Hub::start(files));
    place.pulled("org/tiny");
    assert!(place.hub.asked().iter().all(|asked| !asked.path.ends_with('x')), "{:?}", place.hub.asked());
    let part = r#"{"weight_map": {"a": "../../x"}}"#;
    let mut files = Files::tiny().with("../../x", "x").with("model.safetensors.index.json", part);
    files.0.remove(WEIGHTS);
    let place = Place::new(Hub::start(files));
    assert!(place.refused("org/tiny", &[]).contains("must name files of its folder"));
}

#[test]
fn a_model_that_cannot_be_served_is_refused_before_its_weights_are_asked_for() {
    let llama = Files::tiny().with("config.json", r#"{"model_type": "llama"}"#);
    let words =
        r#"error: org/tiny: model_type "llama" is not supported: its memory grows with the text; supported are"#;
    let place = Place::new(Hub::start(llama.clone()));
    let error = place.refused("org/tiny", &[]);
    assert!(error.starts_with(words), "{error}");
    assert!(place.hub.asked_for(WEIGHTS).is_empty() && place.hub.asked_for("tokenizer.json").is_empty());

    // The listing names the model's type, although its files require a token.
    let mut listing = llama.listing();
    listing["config"] = json!({"model_type": "llama"});
    let hub = Hub::changed(llama, move |asked, _| {
        let body = listing.to_string().into_bytes();
        if asked.path.starts_with("/api/") { Reply { body, ..Reply::status(200) } } else { Reply::status(401) }
    });
    let place = Place::new(hub);
    let error = place.refused("org/tiny", &[]);
    assert!(error.starts_with(words) && place.hub.asked().len() == 1, "{error}");

    let mut head = b"GGUF\x03\0\0\0................general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama".to_vec();
    head.resize(100_000, 0);
    let place = Place::new(Hub::start(Files::default().with("q/x.gguf", head).with("y.gguf", "GGUF")));
    let error = place.refused("org/tiny:q/x.gguf", &[]);
    assert!(error.contains(r#"q/x.gguf is a GGUF file whose architecture "llama" is not supported"#), "{error}");
    let asked = place.hub.asked_for("q/x.gguf");
    assert_eq!(asked.iter().map(|asked| asked.header("range")).collect::<Vec<_>>(), [Some("bytes=0-4095")]);
    let error = place.refused("org/tiny", &[]);
    assert!(error.ends_with("name one of the files with ORG/NAME:FILE: q/x.gguf, y.gguf"), "{error}");
}

/// Returns the tokenizer of the pinned checkpoint with one part replaced.
fn tokenizer_with(part: &str, value: Value) -> Vec<u8> {
    let mut json: Value = serde_json::from_slice(&Files::tiny().0["tokenizer.json"]).unwrap();
    json[part] = value;
    json.to_string().into_bytes()
}

#[test]
fn a_tokenizer_that_cannot_be_served_is_refused_before_the_weights_are_asked_for() {
    let other = tokenizer_with("decoder", json!({"type": "WordPiece", "prefix": "##", "cleanup": true}));
    let small = text(&Files::tiny().0["config.json"]).replace(r#""vocab_size": 300"#, r#""vocab_size": 100"#);
    for (files, words) in [
        (
            Files::tiny().with("tokenizer.json", other.clone()),
            "tokenizer.json: decoder must be ByteLevel, Metaspace, or",
        ),
        (Files::tiny().with("tokenizer.json", "{"), "tokenizer.json: "),
        (
            Files::tiny().with("config.json", small),
            "tokenizer.json: token ids must be below the model's vocab_size (100)",
        ),
        (Files::tiny().with("tokenizer_config.json", r#"{"chat_template": "{% if"}"#), "tokenizer_config.json: "),
        (Files::tiny().with("generation_config.json", r#"{"temperature": -1}"#), "generation_config.json: "),
    ] {
        let place = Place::new(Hub::start(files));
        let error = place.refused("org/tiny", &[]);
        assert!(error.starts_with(&format!("error: org/tiny: {words}")), "{error}");
        assert!(place.hub.asked_for(WEIGHTS).is_empty(), "{:?}", place.hub.asked());
    }

    // A model that another program has downloaded is listed with the same reason.
    let place = Place::new(Hub::start(Files::tiny()));
    let path = place.pulled("org/tiny").join("tokenizer.json");
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, other).unwrap();
    let table = text(&place.command().arg("models").output().unwrap().stdout);
    let line = table.lines().find(|line| line.starts_with("org/tiny")).unwrap_or_else(|| panic!("{table}"));
    assert!(line.contains("  no: tokenizer.json: decoder must be ByteLevel"), "{table}");
}

#[test]
fn a_refusal_says_what_to_do() {
    for (status, code, variables, words) in [
        (401, "GatedRepo", &[][..], "accept its conditions on its page, and set HF_TOKEN"),
        (403, "GatedRepo", &[TOKEN], "accept its conditions on its page, and set HF_TOKEN"),
        (
            401,
            "RepoNotFound",
            &[],
            "there is no such model, or it is not public: set HF_TOKEN to a token that may read it",
        ),
        (401, "", &[TOKEN], "there is no such model, or the token of HF_TOKEN may not read it"),
        (404, "RepoNotFound", &[], "there is no such model or revision"),
        (404, "RevisionNotFound", &[], "there is no such revision"),
    ] {
        let place =
            Place::new(Hub::changed(Files::tiny(), move |_, _| Reply::status(status).with("x-error-code", code)));
        let error = place.refused("org/tiny@x", variables);
        let start = format!("error: {status} from http://{}/api/models/org/tiny/revision/x: ", place.hub.address);
        assert!(error.starts_with(&start) && error.contains(words), "{status} {code}: {error}");
        assert_eq!(place.hub.asked().len(), 1, "{status} is asked again");
    }
}

#[test]
fn a_hub_that_is_busy_is_asked_again() {
    let first = AtomicBool::new(true);
    let hub = Hub::changed(
        Files::tiny(),
        move |_, reply| {
            if first.swap(false, Ordering::SeqCst) { Reply::status(503) } else { reply }
        },
    );
    let place = Place::new(hub);
    let output = place.pull("org/tiny", &[]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("trying again in 0.5 s"), "{}", text(&output.stderr));
}

/// Returns a listing with more bytes than this machine has room for, or `None` if that is not possible.
fn huge() -> Option<Value> {
    /// The largest size that a listing may give.
    const SIZE: u64 = 1 << 50;
    let about = rustix::fs::statvfs(std::env::temp_dir().as_path()).unwrap();
    if about.f_blocks == 0 || about.f_bavail.saturating_mul(about.f_frsize) >= SIZE {
        eprintln!("skipped: there is room for everything");
        return None;
    }
    let mut listing = Files::tiny().listing();
    for file in listing["siblings"].as_array_mut().unwrap() {
        if file["rfilename"] == WEIGHTS {
            file["lfs"]["size"] = SIZE.into();
        }
    }
    Some(listing)
}

#[test]
fn a_newer_commit_without_room_leaves_the_one_in_the_cache() {
    let Some(mut listing) = huge() else { return };
    listing["sha"] = "f".repeat(40).into();
    let is_newer = Arc::new(AtomicBool::new(false));
    let newer = Arc::clone(&is_newer);
    let hub = Hub::changed(Files::tiny(), move |asked, reply| {
        let body = listing.to_string().into_bytes();
        let changed = asked.path.starts_with("/api/") && newer.load(Ordering::SeqCst);
        if changed { Reply { body, ..Reply::status(200) } } else { reply }
    });
    let place = Place::new(hub);
    let path = place.pulled("org/tiny");
    is_newer.store(true, Ordering::SeqCst);
    let output = place.pull("org/tiny", &[]);
    assert_eq!(text(&output.stdout).trim_end(), path.to_str().unwrap(), "{}", text(&output.stderr));
    let log = text(&output.stderr);
    assert!(log.contains("using org/tiny as it is in the cache") && log.contains("1024.0 TiB"), "{log}");
    assert_eq!(std::fs::read_to_string(place.model().join("refs/main")).unwrap(), COMMIT);
}

#[test]
fn more_bytes_than_a_disk_has_are_not_downloaded() {
    let Some(listing) = huge() else { return };
    let hub = Hub::changed(Files::tiny(), move |asked, reply| {
        let body = listing.to_string().into_bytes();
        if asked.path.starts_with("/api/") { Reply { body, ..Reply::status(200) } } else { reply }
    });
    let place = Place::new(hub);
    let error = place.refused(&format!("org/tiny@{COMMIT}"), &[]);
    assert!(error.contains("1024.0 TiB are to be downloaded, but") && error.contains("HF_HUB_CACHE"), "{error}");
    assert!(place.hub.asked_for(WEIGHTS).is_empty());
}

#[test]
fn a_file_that_is_longer_than_listed_is_refused() {
    let hub = Hub::changed(Files::tiny(), |asked, mut reply| {
        if asked.path.ends_with("config.json") {
            reply.body.extend([b' '; 10]);
        }
        reply
    });
    let place = Place::new(hub);
    let error = place.refused("org/tiny", &[]);
    assert!(error.contains("it has more than the") && error.ends_with("bytes listed"), "{error}");
    assert_eq!(std::fs::read_dir(place.model().join("blobs")).unwrap().count(), 0);
}
