//! The files of a model's revision: which of them the cache has, and downloading the others.

use tracing::warn;

use super::cache::Repo;
use super::client::Client;
use super::download::{Wanted, download, missing};
use super::error::HubError;
use super::listing::{Contents, Listing};
use super::name::HubName;
use super::progress::{Progress, size};

/// Maximum size in bytes of a file other than the weights.
pub(super) const MOST_TEXT: u64 = 256 << 20;

/// A revision of a model, as the hub lists it.
pub(super) struct Listed<'a> {
    pub(super) name: &'a HubName,
    pub(super) client: &'a Client,
    pub(super) repo: &'a Repo,
    pub(super) listing: &'a Listing,
}

impl Listed<'_> {
    /// Returns the names of its files.
    pub(super) fn names(&self) -> Vec<String> {
        self.listing.files.keys().cloned().collect()
    }

    pub(super) fn refused(&self, reason: String) -> HubError {
        HubError::Refused { model: self.name.to_string(), reason }
    }

    /// Returns a file of the listing; fails if it is larger than `most` bytes.
    pub(super) fn wanted(&self, file: &str, most: Option<u64>) -> Result<Wanted, HubError> {
        let Some(Contents { id, size }) = self.listing.files.get(file).cloned() else {
            return Err(self.refused(format!("{file} is missing")));
        };
        if most.is_some_and(|most| size > most) {
            return Err(self.refused(format!("{file} has {size} bytes, more than such a file can have")));
        }
        let url = self.client.file_url(self.name, &self.listing.commit, file);
        Ok(Wanted { model: self.name.model().into(), file: file.into(), url, id, size })
    }

    pub(super) fn has(&self, wanted: &Wanted) -> bool {
        self.repo.has(&self.listing.commit, &wanted.file, wanted.size)
    }

    /// Downloads the files that are missing.
    pub(super) fn bring(
        &self,
        wanted: &[Wanted],
        progress: impl FnOnce(&str, u64, u64) -> Progress,
    ) -> Result<(), HubError> {
        let Self { name, client, repo, listing } = self;
        let wanted: Vec<&Wanted> = wanted.iter().filter(|wanted| !self.has(wanted)).collect();
        // These sums cannot overflow 64 bits, because the listing bounds the number and size of files.
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

    /// Records the commit of the branch or tag in the cache.
    pub(super) fn note_commit(&self) {
        let Self { name, repo, listing, .. } = self;
        if let Err(error) = repo.set_commit(name.revision(), &listing.commit) {
            // A cache that cannot be written to is still used.
            warn!("the cache does not note the commit of {name}: {error}");
        }
    }
}
