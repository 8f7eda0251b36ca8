//! Finds RWKV's vocabulary file for models without one: the author's repositories do not include it.

use std::path::{Path, PathBuf};

use tracing::info;

use super::cache::{Repo, files};
use super::choose::{is_vocabulary, vocabulary};
use super::client::Client;
use super::error::HubError;
use super::listed::{Listed, MOST_TEXT};
use super::listing::Listing;
use super::name::HubName;
use super::progress::Progress;
use super::settings::Settings;

/// The default repository of the vocabulary: a small published checkpoint folder of RWKV-7.
pub(crate) const VOCABULARY: &str = "RWKV/RWKV7-Goose-World2.8-0.1B-HF";

/// Where the vocabulary file is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Vocabulary {
    /// A file.
    File(PathBuf),
    /// A repository of a hub.
    Hub(HubName),
}

impl Vocabulary {
    /// Parses a value of `--rwkv-vocabulary`.
    pub(crate) fn of(given: Option<&Path>) -> Result<Self, String> {
        let Some(path) = given else { return VOCABULARY.parse().map(Self::Hub) };
        if path.is_file() {
            return Ok(Self::File(path.into()));
        }
        let wrong = |what: &str| format!("--rwkv-vocabulary {}: {what}", path.display());
        let name = HubName::of(path).ok_or_else(|| wrong("there is no such file, and it is no name on a hub"))?;
        match name.file.as_deref().and_then(|file| file.rsplit('/').next()) {
            Some(file) if !is_vocabulary(file) => Err(wrong("the file must be named rwkv_vocab_v*.txt")),
            _ => Ok(Self::Hub(name)),
        }
    }

    /// Returns the file, if this needs no network.
    pub(crate) fn cached(&self, settings: &Settings) -> Option<PathBuf> {
        match self {
            Self::File(path) => Some(path.clone()),
            Self::Hub(name) => cached(&Repo::new(&settings.cache, name.model()), name),
        }
    }

    /// Returns the file for `model`, downloading it if it is missing. A vocabulary has its date in its name and does
    /// not change, so the hub is not asked if the cache has one.
    pub(crate) fn find(&self, model: &str, settings: &Settings) -> Result<PathBuf, HubError> {
        let found = match self {
            Self::File(path) => Ok(path.clone()),
            Self::Hub(name) => self.cached(settings).map_or_else(|| fetched(name, settings), Ok),
        };
        found.map_err(|source| HubError::Vocabulary { model: model.into(), source: Box::new(source) })
    }
}

/// Returns the vocabulary of a repository: the file that is named, or the newest.
fn chosen<'a>(files: &'a [String], name: &HubName) -> Option<&'a str> {
    match &name.file {
        Some(wanted) => files.iter().find(|file| *file == wanted).map(String::as_str),
        None => vocabulary(files),
    }
}

/// Returns the file in the cache: from the recorded commit, or else, unless a revision is named, from any commit.
fn cached(repo: &Repo, name: &HubName) -> Option<PathBuf> {
    let others = if name.revision.is_some() { Vec::new() } else { repo.commits() };
    repo.commit(name.revision()).into_iter().chain(others).find_map(|commit| {
        let snapshot = repo.snapshot(&commit);
        chosen(&files(&snapshot), name).map(|file| snapshot.join(file))
    })
}

/// Downloads the file.
fn fetched(name: &HubName, settings: &Settings) -> Result<PathBuf, HubError> {
    let repo = Repo::new(&settings.cache, name.model());
    let refused = |reason: String| HubError::Refused { model: name.to_string(), reason };
    if settings.offline {
        let cache = settings.cache.display();
        return Err(refused(format!("it is not in the cache {cache}, and HF_HUB_OFFLINE forbids a download")));
    }
    let client = Client::new(settings)?;
    info!("asking {} for RWKV's vocabulary of {name}", client.endpoint());
    let listing = Listing::ask(&client, name, &mut client.tries())?;
    let listed = Listed { name, client: &client, repo: &repo, listing: &listing };
    let names = listed.names();
    let file = chosen(&names, name).ok_or_else(|| {
        refused("there is no such file: name a file, or another repository, with --rwkv-vocabulary".into())
    })?;
    listed.bring(&[listed.wanted(file, Some(MOST_TEXT))?], Progress::hidden)?;
    // The cache may have the rest of the repository, from another commit.
    if repo.commit(name.revision()).is_none() {
        listed.note_commit();
    }
    Ok(repo.snapshot(&listing.commit).join(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vocabulary_is_a_file_or_in_a_repository() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rwkv_vocab_v20230424.txt");
        std::fs::write(&path, "").unwrap();
        assert_eq!(Vocabulary::of(Some(&path)), Ok(Vocabulary::File(path.clone())));
        let hub = |text: &str| Ok(Vocabulary::Hub(text.parse().unwrap()));
        assert_eq!(Vocabulary::of(None), hub(VOCABULARY));
        assert_eq!(Vocabulary::of(Some(Path::new("nobody/x@v1"))), hub("nobody/x@v1"));
        let error = Vocabulary::of(Some(folder.path())).unwrap_err();
        assert!(error.starts_with("--rwkv-vocabulary /") && error.contains("there is no such file"), "{error}");
        assert!(Vocabulary::of(Some(Path::new("nobody/x:y/rwkv_vocab_v2.txt"))).is_ok());
        assert!(
            Vocabulary::of(Some(Path::new("nobody/x:README.md"))).unwrap_err().contains("must be named rwkv_vocab")
        );
    }
}
