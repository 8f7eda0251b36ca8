//! Assembles a model of a hub in the cache.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use tidegate_model::checkpoint::{INDEX, shards};
use tidegate_server::checkpoint::{self, OpenError};
use tracing::{debug, info, warn};

use super::cache::{Repo, files};
use super::choose::{CONFIG, Choice, Weights, choose, is_gguf, vocabulary_of};
use super::client::Client;
use super::error::HubError;
use super::listed::{Listed, MOST_TEXT};
use super::listing::Listing;
use super::name::{Commit, HubName};
use super::progress::Progress;
use super::settings::Settings;
use super::vocabulary::Vocabulary;

/// Number of bytes of a GGUF file that show what it contains.
const HEAD: u64 = 4096;
/// Number of bytes of other files that do: they contain the names of the first tensors.
pub(super) const NATIVE_HEAD: u64 = 1 << 16;

/// A model in the cache.
#[derive(Debug)]
pub(crate) struct Fetched {
    /// The model's folder or file.
    pub(crate) path: PathBuf,
    /// RWKV's vocabulary file, if the model is a file without one.
    pub(crate) vocabulary: Option<PathBuf>,
}

/// Returns a model in the cache, after downloading what is missing. For a branch or tag, this is the newest commit,
/// unless there is no network. If the model needs RWKV's vocabulary and its repository has none, it is taken from
/// `elsewhere`; if that is `None`, only the weights are wanted.
pub(crate) fn fetch(name: &HubName, elsewhere: Option<&Vocabulary>, settings: &Settings) -> Result<Fetched, HubError> {
    let repo = Repo::new(&settings.cache, name.model());
    let path = model(name, &repo, elsewhere, settings)?;
    let Some(elsewhere) = elsewhere.filter(|_| path.is_file() && !is_gguf(&path.to_string_lossy())) else {
        return Ok(Fetched { path, vocabulary: None });
    };
    let vocabulary = own_vocabulary(&repo, &path).map_or_else(|| elsewhere.find(&name.to_string(), settings), Ok)?;
    Ok(Fetched { path, vocabulary: Some(vocabulary) })
}

/// Returns the vocabulary that the repository has for `model`, a file in one of its snapshots.
fn own_vocabulary(repo: &Repo, model: &Path) -> Option<PathBuf> {
    let snapshots = repo.folder().join("snapshots");
    let snapshot = model.ancestors().find(|folder| folder.parent() == Some(&snapshots))?;
    let file = model.strip_prefix(snapshot).ok()?.to_str()?;
    vocabulary_of(&files(snapshot), file).map(|own| snapshot.join(own))
}

/// Returns the folder or file of a model.
fn model(
    name: &HubName,
    repo: &Repo,
    elsewhere: Option<&Vocabulary>,
    settings: &Settings,
) -> Result<PathBuf, HubError> {
    let known = repo.commit(name.revision()).ok_or_else(|| "it is not there".to_owned());
    let cached = known.and_then(|commit| Cached::of(&repo.snapshot(&commit), name));
    let refused = |reason: String| HubError::Refused { model: name.to_string(), reason };
    match cached {
        // A commit never changes.
        Ok(Cached { path, guess: false }) if settings.offline || name.commit().is_some() => Ok(path),
        Ok(cached) if settings.offline => Ok(cached.used(name, &"HF_HUB_OFFLINE")),
        Err(reason) if settings.offline => {
            let cache = settings.cache.display();
            Err(refused(format!("not in the cache {cache} ({reason}), and HF_HUB_OFFLINE forbids a download")))
        }
        cached => {
            let client = Client::new(settings)?;
            let mut tries = if cached.is_ok() { Client::once() } else { client.tries() };
            info!("asking {} for the commit of {name}", client.endpoint());
            let fetched = Listing::ask(&client, name, &mut tries).and_then(|listing| {
                debug!("{name} is the commit {}", listing.commit.text());
                newest(&Listed { name, client: &client, repo, listing: &listing }, elsewhere, settings)
            });
            match (fetched, cached) {
                // The model in the cache can be served anyway.
                (Err(error), Ok(cached)) if error.is_passing() => Ok(cached.used(name, &error)),
                (fetched, _) => fetched,
            }
        }
    }
}

/// A model that the cache has.
struct Cached {
    path: PathBuf,
    /// Whether this is only the one file that was downloaded, while the hub's repository may have others that are
    /// meant.
    guess: bool,
}

impl Cached {
    /// Finds everything that a model needs in a snapshot.
    fn of(snapshot: &Path, name: &HubName) -> Result<Self, String> {
        let path = complete(snapshot, name.file.as_deref())?;
        Ok(Self { guess: name.file.is_none() && path != snapshot, path })
    }

    /// Returns the path, and logs a warning.
    fn used(self, name: &HubName, reason: &dyn Display) -> PathBuf {
        if self.guess {
            warn!(
                "using {}, the only model of {name} in the cache; the hub may have others: {reason}",
                self.path.display()
            );
        } else {
            warn!("using {name} as it is in the cache, which may not be the newest: {reason}");
        }
        self.path
    }
}

/// Downloads what is missing of the newest commit, and then records that commit in the cache.
fn newest(listed: &Listed, elsewhere: Option<&Vocabulary>, settings: &Settings) -> Result<PathBuf, HubError> {
    let Listed { name, repo, listing, .. } = listed;
    let kind = listing.model_type.as_deref().filter(|_| name.file.is_none());
    if let Some(reason) = kind.and_then(checkpoint::refused_type) {
        return Err(listed.refused(reason));
    }
    let path = match choose(&listed.names(), name.file.as_deref()).map_err(|reason| listed.refused(reason))? {
        Choice::File(name) => file(listed, &name, elsewhere, settings)?,
        Choice::Folder { texts, weights } => folder(listed, &texts, weights)?,
    };
    if let Some(kept) = folder_of_another_commit(name, repo, listing) {
        info!(
            "{} of {} stays the commit {} in the cache, whose folder is complete",
            name.revision(),
            name.model(),
            kept.text()
        );
    } else {
        listed.note_commit();
    }
    Ok(path)
}

/// Returns the recorded commit if its folder is complete and recording a newer commit, of which only one file was
/// downloaded, would hide it: without a network, only that file of the model would then be found.
fn folder_of_another_commit(name: &HubName, repo: &Repo, listing: &Listing) -> Option<Commit> {
    let noted = repo.commit(name.revision()).filter(|noted| name.file.is_some() && *noted != listing.commit)?;
    let snapshot = repo.snapshot(&noted);
    complete(&snapshot, None).is_ok_and(|path| path == snapshot).then_some(noted)
}

/// Returns the folder or file of a model, if its snapshot has everything that the model needs.
///
/// Weights are downloaded last: if they are there, the optional files are too.
pub(super) fn complete(snapshot: &Path, wanted: Option<&str>) -> Result<PathBuf, String> {
    let there = files(snapshot);
    match choose(&there, wanted)? {
        // This may be a folder whose weights are missing, with a file beside it that was downloaded by its name.
        Choice::File(file) if wanted.is_none() && there.iter().any(|file| file == CONFIG) => {
            Err(format!("there are no weights beside {CONFIG}; name the file if {file} is meant"))
        }
        Choice::File(file) => Ok(snapshot.join(file)),
        Choice::Folder { weights: Weights::One(_), .. } => Ok(snapshot.into()),
        Choice::Folder { weights: Weights::Listed, .. } => {
            let parts = shards(&snapshot.join(INDEX)).map_err(|error| error.to_string())?;
            match parts.iter().find(|part| !there.contains(part)) {
                Some(part) => Err(format!("{part} is missing")),
                None => Ok(snapshot.into()),
            }
        }
    }
}

/// Returns why a model in a snapshot cannot be served, in one line and without its path in the cache.
pub(super) fn reason(error: &OpenError, path: &Path) -> String {
    let (text, path) = (error.to_string(), path.display().to_string());
    let text =
        text.strip_prefix(&path).and_then(|rest| rest.strip_prefix(": ").or(rest.strip_prefix('/'))).unwrap_or(&text);
    text.lines().collect::<Vec<_>>().join(" ")
}

/// Downloads a file that holds a whole model, if its first bytes show that it can be served.
fn file(listed: &Listed, file: &str, elsewhere: Option<&Vocabulary>, settings: &Settings) -> Result<PathBuf, HubError> {
    let wanted = listed.wanted(file, None)?;
    if !listed.has(&wanted) {
        let head = |most: u64| listed.client.head(&wanted.url, most.min(wanted.size));
        let refused = if is_gguf(file) {
            checkpoint::refused_gguf(file, &head(HEAD)?)
        } else {
            checkpoint::refused_native(file, &head(NATIVE_HEAD)?)
        };
        if let Some(reason) = refused {
            return Err(listed.refused(reason));
        }
    }
    if !is_gguf(file) {
        // Fetch the vocabulary first: without it, the weights are useless.
        match (vocabulary_of(&listed.names(), file), elsewhere) {
            (Some(own), _) => listed.bring(&[listed.wanted(own, Some(MOST_TEXT))?], Progress::hidden)?,
            (None, Some(elsewhere)) => drop(elsewhere.find(&listed.name.to_string(), settings)?),
            (None, None) => {}
        }
    }
    listed.bring(&[wanted], Progress::new)?;
    Ok(listed.repo.snapshot(&listed.listing.commit).join(file))
}

/// Downloads a checkpoint folder. `config.json` comes first, because it shows whether the model can be served; the
/// weights come last.
fn folder(listed: &Listed, texts: &[String], weights: Weights) -> Result<PathBuf, HubError> {
    let snapshot = listed.repo.snapshot(&listed.listing.commit);
    let mut wanted = texts.iter().map(|file| listed.wanted(file, Some(MOST_TEXT))).collect::<Result<Vec<_>, _>>()?;
    listed.bring(&wanted[..1], Progress::hidden)?;
    let path = snapshot.join(CONFIG);
    let config = std::fs::read_to_string(&path).map_err(HubError::at(&path))?;
    if let Some(reason) = checkpoint::refused_config(&config) {
        return Err(listed.refused(reason));
    }
    listed.bring(&wanted, Progress::hidden)?;
    let parts = match weights {
        Weights::One(file) => vec![file.to_owned()],
        Weights::Listed => shards(&snapshot.join(INDEX)).map_err(|error| listed.refused(error.to_string()))?,
    };
    let weights = parts.iter().map(|part| listed.wanted(part, None)).collect::<Result<Vec<_>, _>>()?;
    // Other text files may rule the model out as well. Reading them takes a while, so skip it if there is nothing to
    // download.
    if !weights.iter().all(|part| listed.has(part)) {
        checkpoint::check_text(&snapshot).map_err(|error| listed.refused(reason(&error, &snapshot)))?;
    }
    wanted.extend(weights);
    listed.bring(&wanted, Progress::new)?;
    Ok(snapshot)
}
