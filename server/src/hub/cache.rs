//! The folders of the cache, which are the same as those of Python's `huggingface_hub`:
//!
//! ```text
//! models--ORG--NAME/blobs/DIGEST              the contents of files
//! models--ORG--NAME/blobs/DIGEST.incomplete   the beginning of a file
//! models--ORG--NAME/refs/REVISION             the commit of a branch or tag
//! models--ORG--NAME/snapshots/COMMIT/FILE     a link to the contents
//! .locks/models--ORG--NAME/DIGEST.lock        locked by the process that downloads the contents
//! ```

use std::fs::{self, File, Permissions, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use tracing::warn;

use super::error::HubError;
use super::name::{BlobId, Commit, is_file, is_repo};
use super::shared::{create_new, create_parent, open_or_create};

/// The prefix of the names of models' folders.
const PREFIX: &str = "models--";
/// Replaces the slash in these names.
const SLASH: &str = "--";

/// Maximum depth of the folders, and maximum number of files, that are looked at in a snapshot.
const MOST_DEPTH: usize = 8;
const MOST_FILES: usize = 10_000;

/// The folders of one model.
#[derive(Clone, Debug)]
pub(super) struct Repo {
    folder: PathBuf,
    locks: PathBuf,
}

impl Repo {
    /// Returns the folders of the model `repo` in the folder `cache`.
    pub(super) fn new(cache: &Path, repo: &str) -> Self {
        let name = format!("{PREFIX}{}", repo.replace('/', SLASH));
        Self { locks: cache.join(".locks").join(&name), folder: cache.join(name) }
    }

    /// Returns every model in a cache, sorted by name. A cache that does not exist has none.
    pub(super) fn all(cache: &Path) -> Result<Vec<(String, Self)>, HubError> {
        let entries = match fs::read_dir(cache) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(HubError::at(cache))?,
        };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let repos = names.filter_map(|name| Some(name.strip_prefix(PREFIX)?.replacen(SLASH, "/", 1)));
        let mut found: Vec<_> =
            repos.filter(|repo| is_repo(repo)).map(|repo| (repo.clone(), Self::new(cache, &repo))).collect();
        found.sort_by(|(one, _), (other, _)| one.cmp(other));
        Ok(found)
    }

    pub(super) fn blob(&self, id: &BlobId) -> PathBuf {
        self.folder.join("blobs").join(id.text())
    }

    pub(super) fn incomplete(&self, id: &BlobId) -> PathBuf {
        self.folder.join("blobs").join(format!("{}.incomplete", id.text()))
    }

    pub(super) fn snapshot(&self, commit: &Commit) -> PathBuf {
        self.folder.join("snapshots").join(commit.text())
    }

    /// Returns the commit of a revision, if the cache knows it.
    pub(super) fn commit(&self, revision: &str) -> Option<Commit> {
        let known = || fs::read_to_string(self.folder.join("refs").join(revision)).ok();
        Commit::new(revision).or_else(|_| Commit::new(known().unwrap_or_default().trim())).ok()
    }

    /// Returns the commits that have files in the cache.
    pub(super) fn commits(&self) -> Vec<Commit> {
        let entries = fs::read_dir(self.folder.join("snapshots")).into_iter().flatten();
        let mut commits: Vec<_> =
            entries.filter_map(|entry| Commit::new(entry.ok()?.file_name().to_str()?).ok()).collect();
        commits.sort();
        commits
    }

    /// Returns the known branches and tags, with their commits.
    pub(super) fn revisions(&self) -> Vec<(String, Commit)> {
        let refs = files(&self.folder.join("refs"));
        refs.into_iter().filter_map(|name| Some((name.clone(), self.commit(&name)?))).collect()
    }

    /// Records the commit of a branch or tag.
    pub(super) fn set_commit(&self, revision: &str, commit: &Commit) -> Result<(), HubError> {
        if revision == commit.text() || self.commit(revision).as_ref() == Some(commit) {
            return Ok(());
        }
        let path = self.folder.join("refs").join(revision);
        create_parent(&path)?;
        let new = beside(&path);
        create_new(&new).and_then(|mut file| file.write_all(commit.text().as_bytes())).map_err(HubError::at(&new))?;
        fs::rename(&new, &path).map_err(HubError::at(&path))
    }

    /// Returns whether the cache has a file of a commit, with this size.
    pub(super) fn has(&self, commit: &Commit, file: &str, size: u64) -> bool {
        is_there(&self.snapshot(commit).join(file), size)
    }

    /// Returns whether the cache has these contents, with this size.
    pub(super) fn has_blob(&self, id: &BlobId, size: u64) -> bool {
        is_there(&self.blob(id), size)
    }

    /// Makes a file of a commit a link to its contents.
    pub(super) fn link(&self, commit: &Commit, file: &str, id: &BlobId) -> Result<(), HubError> {
        let path = self.snapshot(commit).join(file);
        // The link is relative, so that the cache can be moved. It leads out of the file's folders, the commit's folder
        // and `snapshots`.
        let up = "../".repeat(file.split('/').count() + 1);
        let target = format!("{up}blobs/{}", id.text());
        create_parent(&path)?;
        let new = beside(&path);
        symlink(&target, &new).map_err(HubError::at(&new))?;
        fs::rename(&new, &path).map_err(HubError::at(&path))
    }

    /// Waits until no other process downloads these contents, and keeps others from doing so until the returned file is
    /// dropped.
    pub(super) fn lock(&self, id: &BlobId) -> Result<File, HubError> {
        let path = self.locks.join(format!("{}.lock", id.text()));
        create_parent(&path)?;
        let file = open_or_create(&path).map_err(HubError::at(&path))?;
        // Same mode as in Python's cache, so that a group that shares the cache can lock it too. Only the owner can
        // change the mode.
        let _ = file.set_permissions(Permissions::from_mode(0o664));
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => {
                warn!("waiting for another process, which downloads the same file: it has locked {}", path.display());
                file.lock().map_err(HubError::at(&path))?;
            }
            // Some file systems have no locks. There, two processes can corrupt a download, which its digest then
            // shows.
            Ok(()) | Err(TryLockError::Error(_)) => {}
        }
        Ok(file)
    }

    /// Returns the free bytes of the cache's file system, if it reports them.
    pub(super) fn free(&self) -> Option<u64> {
        let existing = self.folder.ancestors().find(|folder| folder.exists())?;
        let about = rustix::fs::statvfs(existing).ok()?;
        // Some file systems report no size.
        (about.f_blocks > 0).then(|| about.f_bavail.saturating_mul(about.f_frsize))
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }
}

/// Returns the files below a folder as paths relative to it, sorted by name. Links count if their targets exist.
pub(super) fn files(folder: &Path) -> Vec<String> {
    let (mut found, mut folders) = (Vec::new(), vec![(String::new(), 0)]);
    while let Some((within, depth)) = folders.pop() {
        for entry in fs::read_dir(folder.join(&within)).into_iter().flatten().flatten() {
            let Ok(name) = entry.file_name().into_string() else { continue };
            let path = if within.is_empty() { name } else { format!("{within}/{name}") };
            match fs::metadata(folder.join(&path)) {
                Ok(about) if about.is_file() && is_file(&path) && found.len() < MOST_FILES => found.push(path),
                Ok(about) if about.is_dir() && depth < MOST_DEPTH => folders.push((path, depth + 1)),
                _ => {}
            }
        }
    }
    found.sort();
    found
}

fn is_there(path: &Path, size: u64) -> bool {
    fs::metadata(path).is_ok_and(|about| about.is_file() && about.len() == size)
}

/// Returns a new name in the same folder, for a file that is then renamed.
fn beside(path: &Path) -> PathBuf {
    path.with_file_name(format!(".{:016x}.tmp", rand::random::<u64>()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    #[test]
    fn the_folders_are_those_of_python() {
        let cache = tempfile::tempdir().unwrap();
        let repo = Repo::new(cache.path(), "org/name");
        let (id, commit) = (BlobId::git(&"a".repeat(40)).unwrap(), Commit::new(COMMIT).unwrap());
        let folder = cache.path().join("models--org--name");
        create_parent(&repo.blob(&id)).unwrap();
        fs::write(folder.join("blobs").join("a".repeat(40)), "{}").unwrap();
        for (file, target) in [
            ("config.json", format!("../../blobs/{}", id.text())),
            ("gguf/q8/x.gguf", format!("../../../../blobs/{}", id.text())),
        ] {
            repo.link(&commit, file, &id).unwrap();
            // An existing link is replaced.
            repo.link(&commit, file, &id).unwrap();
            let path = folder.join("snapshots").join(COMMIT).join(file);
            assert_eq!(fs::read_link(&path).unwrap().to_str(), Some(target.as_str()));
            assert_eq!(fs::read_to_string(&path).unwrap(), "{}");
            assert!(repo.has(&commit, file, 2) && !repo.has(&commit, file, 3));
        }
        assert_eq!(files(&repo.snapshot(&commit)), ["config.json", "gguf/q8/x.gguf"]);
        fs::remove_file(repo.blob(&id)).unwrap();
        assert_eq!(files(&repo.snapshot(&commit)), Vec::<String>::new(), "links to nothing");

        assert_eq!(repo.commit("main"), None);
        repo.set_commit("main", &commit).unwrap();
        repo.set_commit("refs/pr/1", &commit).unwrap();
        assert_eq!(fs::read_to_string(folder.join("refs/main")).unwrap(), COMMIT);
        let known = [("main".to_owned(), commit.clone()), ("refs/pr/1".to_owned(), commit.clone())];
        assert_eq!((repo.revisions(), repo.commits()), (known.to_vec(), vec![commit]));
        let lock = repo.lock(&id).unwrap();
        let other = File::open(cache.path().join(format!(".locks/models--org--name/{}.lock", id.text()))).unwrap();
        assert!(matches!(other.try_lock(), Err(TryLockError::WouldBlock)));
        drop(lock);
        other.try_lock().unwrap();
    }

    #[test]
    fn models_are_listed_by_name_and_other_folders_are_not() {
        let cache = tempfile::tempdir().unwrap();
        assert!(Repo::all(&cache.path().join("none")).unwrap().is_empty());
        for name in ["models--b--y", "models--a--x", "datasets--a--x", "models--gpt2", "version.txt", ".locks"] {
            fs::create_dir(cache.path().join(name)).unwrap();
        }
        let names: Vec<String> = Repo::all(cache.path()).unwrap().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["a/x", "b/y"]);
    }

    #[test]
    fn a_wrong_commit_in_the_cache_is_no_path() {
        let cache = tempfile::tempdir().unwrap();
        let repo = Repo::new(cache.path(), "org/name");
        let path = repo.folder().join("refs/main");
        create_parent(&path).unwrap();
        fs::write(path, "../../../elsewhere").unwrap();
        assert_eq!(repo.commit("main"), None);
    }
}
