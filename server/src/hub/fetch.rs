//! Puts a model of a hub together in the cache.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use tidegate_model::checkpoint::{INDEX, shards};
use tidegate_server::checkpoint::{self, OpenError};
use tracing::{debug, info, warn};

use super::cache::{Repo, files};
use super::choose::{CONFIG, Choice, Weights, choose};
use super::client::Client;
use super::download::{Wanted, download, missing};
use super::error::HubError;
use super::listing::{Contents, Listing};
use super::name::{Commit, HubName};
use super::progress::{Progress, size};
use super::settings::Settings;

/// Most bytes of a file that is not weights.
const MOST_TEXT: u64 = 256 << 20;
/// Bytes of a GGUF file that say what it is.
const HEAD: u64 = 4096;

/// The folder or the file of a model in the cache. What is missing is downloaded first: the newest commit of a branch or tag,
/// unless there is no network.
pub(crate) fn fetch(name: &HubName, settings: &Settings) -> Result<PathBuf, HubError> {
    let repo = Repo::new(&settings.cache, name.model());
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
            match (newest(name, &client, &repo, cached.is_ok()), cached) {
                // What is in the cache can be served all the same.
                (Err(error), Ok(cached)) if error.is_passing() => Ok(cached.used(name, &error)),
                (fetched, _) => fetched,
            }
        }
    }
}

/// What the cache has of a model.
struct Cached {
    path: PathBuf,
    /// Whether it is just the only file that was downloaded, and the hub's repository may have others that are meant.
    guess: bool,
}

impl Cached {
    /// Everything that a model needs, if it is in the snapshot.
    fn of(snapshot: &Path, name: &HubName) -> Result<Self, String> {
        let path = complete(snapshot, name.file.as_deref())?;
        Ok(Self { guess: name.file.is_none() && path != snapshot, path })
    }

    /// The path, with a warning.
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

/// Downloads what is missing of the newest commit, which the cache then notes.
fn newest(name: &HubName, client: &Client, repo: &Repo, is_cached: bool) -> Result<PathBuf, HubError> {
    info!("asking {} for the commit of {name}", client.endpoint());
    let mut tries = if is_cached { Client::once() } else { client.tries() };
    let listing = Listing::ask(client, name, &mut tries)?;
    debug!("{name} is the commit {}", listing.commit.text());
    let path = Fetching { name, client, repo, listing: &listing }.run()?;
    if let Some(kept) = folder_of_another_commit(name, repo, &listing) {
        info!(
            "{} of {} stays the commit {} in the cache, whose folder is complete",
            name.revision(),
            name.model(),
            kept.text()
        );
    } else if let Err(error) = repo.set_commit(name.revision(), &listing.commit) {
        // A cache that cannot be written to is used all the same.
        warn!("the cache does not note the commit of {name}: {error}");
    }
    Ok(path)
}

/// The commit that the cache notes, if the download of one file of a newer one would hide its folder: without a network, the
/// file would then be all that there is of the model.
fn folder_of_another_commit(name: &HubName, repo: &Repo, listing: &Listing) -> Option<Commit> {
    let noted = repo.commit(name.revision()).filter(|noted| name.file.is_some() && *noted != listing.commit)?;
    let snapshot = repo.snapshot(&noted);
    complete(&snapshot, None).is_ok_and(|path| path == snapshot).then_some(noted)
}

/// The folder or the file of a model, if everything that it needs is in its snapshot.
///
/// Weights are downloaded last: where they are, the optional files are too.
pub(super) fn complete(snapshot: &Path, wanted: Option<&str>) -> Result<PathBuf, String> {
    let there = files(snapshot);
    match choose(&there, wanted)? {
        // What is there may be a folder whose weights are missing, beside a file that was downloaded by its name.
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

/// Why a model of a snapshot cannot be served, in one line that does not repeat where the cache has it.
pub(super) fn reason(error: &OpenError, path: &Path) -> String {
    let (text, path) = (error.to_string(), path.display().to_string());
    let text =
        text.strip_prefix(&path).and_then(|rest| rest.strip_prefix(": ").or(rest.strip_prefix('/'))).unwrap_or(&text);
    text.lines().collect::<Vec<_>>().join(" ")
}

/// A download of a model.
struct Fetching<'a> {
    name: &'a HubName,
    client: &'a Client,
    repo: &'a Repo,
    listing: &'a Listing,
}

impl Fetching<'_> {
    fn run(&self) -> Result<PathBuf, HubError> {
        let Self { name, repo, listing, .. } = self;
        if name.file.is_none()
            && let Some(reason) = listing.model_type.as_deref().and_then(checkpoint::refused_type)
        {
            return Err(self.refused(reason));
        }
        let names: Vec<String> = listing.files.keys().cloned().collect();
        let choice = choose(&names, name.file.as_deref()).map_err(|reason| self.refused(reason))?;
        let snapshot = repo.snapshot(&listing.commit);
        match choice {
            Choice::File(file) => {
                let wanted = self.wanted(&file, None)?;
                if !self.has(&wanted) {
                    let head = self.client.head(&wanted.url, HEAD.min(wanted.size))?;
                    if let Some(reason) = checkpoint::refused_gguf(&file, &head) {
                        return Err(self.refused(reason));
                    }
                }
                self.bring(&[wanted], Progress::new)?;
                Ok(snapshot.join(file))
            }
            Choice::Folder { texts, weights } => {
                let mut wanted =
                    texts.iter().map(|file| self.wanted(file, Some(MOST_TEXT))).collect::<Result<Vec<_>, _>>()?;
                self.bring(&wanted[..1], Progress::hidden)?;
                let path = snapshot.join(CONFIG);
                let config = std::fs::read_to_string(&path).map_err(HubError::at(&path))?;
                if let Some(reason) = checkpoint::refused_config(&config) {
                    return Err(self.refused(reason));
                }
                // The other texts are few and short, and may refuse the model too.
                self.bring(&wanted, Progress::hidden)?;
                checkpoint::check_text(&snapshot).map_err(|error| self.refused(reason(&error, &snapshot)))?;
                let parts = match weights {
                    Weights::One(file) => vec![file.to_owned()],
                    Weights::Listed => {
                        shards(&snapshot.join(INDEX)).map_err(|error| self.refused(error.to_string()))?
                    }
                };
                for part in &parts {
                    wanted.push(self.wanted(part, None)?);
                }
                self.bring(&wanted, Progress::new)?;
                Ok(snapshot)
            }
        }
    }

    fn refused(&self, reason: String) -> HubError {
        HubError::Refused { model: self.name.to_string(), reason }
    }

    /// A file of the listing, with at most so many bytes.
    fn wanted(&self, file: &str, most: Option<u64>) -> Result<Wanted, HubError> {
        let Some(Contents { id, size }) = self.listing.files.get(file).cloned() else {
            return Err(self.refused(format!("{file} is missing")));
        };
        if most.is_some_and(|most| size > most) {
            return Err(self.refused(format!("{file} has {size} bytes, more than such a file can have")));
        }
        let url = self.client.file_url(self.name, &self.listing.commit, file);
        Ok(Wanted { model: self.name.model().into(), file: file.into(), url, id, size })
    }

    fn has(&self, wanted: &Wanted) -> bool {
        self.repo.has(&self.listing.commit, &wanted.file, wanted.size)
    }

    /// Downloads the files that are not there.
    fn bring(&self, wanted: &[Wanted], progress: impl FnOnce(&str, u64, u64) -> Progress) -> Result<(), HubError> {
        let Self { name, client, repo, listing } = self;
        let wanted: Vec<&Wanted> = wanted.iter().filter(|wanted| !self.has(wanted)).collect();
        // A listing has few enough files, and they are small enough, for sums of 64 bits.
        let total = wanted.iter().map(|wanted| wanted.size).sum();
        let missing = wanted.iter().map(|wanted| missing(repo, wanted)).sum();
        if let Some(free) = repo.free().filter(|free| *free < missing) {
            return Err(HubError::Full {
                model: name.to_string(),
                missing: size(missing),
                free: size(free),
                cache: repo.folder().into(),
            });
        }
        let mut progress = progress(name.model(), total, missing);
        for wanted in wanted {
            download(client, repo, wanted, &mut progress)?;
            repo.link(&listing.commit, &wanted.file, &wanted.id)?;
            progress.end(wanted.size);
        }
        Ok(())
    }
}
