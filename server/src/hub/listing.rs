//! The hub's description of a model's revision: its commit and its files.

use std::collections::BTreeMap;

use serde::Deserialize;
use tracing::debug;

use super::address::public;
use super::client::{Client, Tries};
use super::error::HubError;
use super::name::{BlobId, Commit, HubName, is_file, shown};

/// Maximum size of the answer in bytes.
const MOST_BYTES: u64 = 32 << 20;
/// Maximum number of files of a model.
const MOST_FILES: usize = 10_000;
/// Maximum size of a file in bytes: more than any disk has.
const MOST_SIZE: u64 = 1 << 50;

/// A revision of a model.
#[derive(Debug)]
pub(super) struct Listing {
    pub(super) commit: Commit,
    pub(super) files: BTreeMap<String, Contents>,
    /// The `model_type` that the hub reports, even for models whose files are not public.
    pub(super) model_type: Option<String>,
}

/// The contents of a file.
#[derive(Clone, Debug)]
pub(super) struct Contents {
    pub(super) id: BlobId,
    pub(super) size: u64,
}

// The hub's JSON format.

#[derive(Deserialize)]
struct Wire {
    sha: String,
    #[serde(default)]
    siblings: Vec<WireFile>,
    config: Option<serde_json::Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireFile {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<WireLfs>,
}

#[derive(Deserialize)]
struct WireLfs {
    sha256: String,
    size: u64,
}

impl Listing {
    /// Requests the listing from the hub.
    pub(super) fn ask(client: &Client, name: &HubName, tries: &mut Tries) -> Result<Self, HubError> {
        let url = client.info_url(name);
        let wire: Wire = client.json(&url, MOST_BYTES, tries)?;
        let listing = Self::checked(wire).map_err(|reason| HubError::Answer { url: public(&url), reason })?;
        match name.commit() {
            Some(commit) if commit != listing.commit => {
                let reason = format!("it describes the commit {}", listing.commit.text());
                Err(HubError::Answer { url: public(&url), reason })
            }
            _ => Ok(listing),
        }
    }

    fn checked(wire: Wire) -> Result<Self, String> {
        let commit = Commit::new(&wire.sha)?;
        if wire.siblings.len() > MOST_FILES {
            return Err(format!("it lists more than {MOST_FILES} files"));
        }
        let mut files = BTreeMap::new();
        for WireFile { rfilename, size, blob_id, lfs } in wire.siblings {
            if !is_file(&rfilename) {
                // The file is not downloaded under any name. A model that does not need it is still accepted.
                debug!(
                    "a file of the listing is left out, because its name may lead elsewhere: {:?}",
                    shown(&rfilename)
                );
                continue;
            }
            let contents = match (lfs, blob_id, size) {
                (Some(WireLfs { sha256, size }), ..) => Contents { id: BlobId::sha256(&sha256)?, size },
                (None, Some(id), Some(size)) => Contents { id: BlobId::git(&id)?, size },
                _ => return Err(format!("it has no digest and size of {rfilename}")),
            };
            if contents.size > MOST_SIZE {
                return Err(format!("{rfilename} has {} bytes", contents.size));
            }
            files.insert(rfilename, contents);
        }
        let model_type = wire.config.and_then(|config| Some(config.get("model_type")?.as_str()?.to_owned()));
        Ok(Self { commit, files, model_type })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(value: Value) -> Result<Listing, String> {
        Listing::checked(serde_json::from_value(value).map_err(|error| error.to_string())?)
    }

    #[test]
    fn a_listing_has_digests_and_sizes() {
        let (commit, git, sha256) = ("c".repeat(40), "a".repeat(40), "b".repeat(64));
        let listing = read(json!({"sha": commit, "config": {"model_type": "rwkv7"}, "likes": 3, "siblings": [
            {"rfilename": "config.json", "size": 2, "blobId": git},
            {"rfilename": "model.safetensors", "size": 9, "blobId": git, "lfs": {"sha256": sha256, "size": 9, "pointerSize": 1}},
        ]}))
        .unwrap();
        assert_eq!((listing.commit.text(), listing.model_type.as_deref()), (commit.as_str(), Some("rwkv7")));
        let weights = &listing.files["model.safetensors"];
        assert_eq!((&weights.id, weights.size), (&BlobId::Sha256(sha256), 9));
        assert_eq!(listing.files["config.json"].id, BlobId::Git(git));
        assert_eq!(read(json!({"sha": commit, "config": null})).unwrap().model_type, None);
    }

    #[test]
    fn a_listing_that_could_lead_elsewhere_is_refused() {
        let (commit, git) = ("c".repeat(40), "a".repeat(40));
        let with = |file: Value| read(json!({"sha": commit, "siblings": [file]})).unwrap_err();
        for name in ["../x", "/etc/passwd", "a/../../x", "a\\b", "", "a\u{7}b", "a//b", &"x".repeat(300)] {
            let file = json!({"rfilename": name, "size": 2, "blobId": git});
            let good = json!({"rfilename": "x", "size": 2, "blobId": git});
            let listing = read(json!({"sha": commit, "siblings": [file, good]})).unwrap();
            assert_eq!(listing.files.into_keys().collect::<Vec<_>>(), ["x"], "{name}");
        }
        for (file, words) in [
            (json!({"rfilename": "x", "size": 2, "blobId": "../../x"}), "the name of a file's contents must be"),
            (json!({"rfilename": "x", "size": 2}), "it has no digest"),
            (json!({"rfilename": "x", "blobId": git}), "it has no digest"),
            (json!({"rfilename": "x", "lfs": {"sha256": "/x", "size": 2}}), "a SHA-256 must be"),
            (json!({"rfilename": "x", "size": u64::MAX, "blobId": git}), "x has 18446744073709551615 bytes"),
            (json!({"rfilename": "x", "size": -1, "blobId": git}), "invalid value"),
        ] {
            let error = with(file);
            assert!(error.starts_with(words), "{words}: {error}");
        }
        assert!(read(json!({"sha": "../../x"})).unwrap_err().starts_with("a commit must be 40 hexadecimal digits"));
    }
}
