//! The download of one file: continued where it was cut off, and kept only if its digest is the one that the hub lists.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use sha1::Sha1;
use sha2::{Digest, Sha256};
use url::Url;

use super::cache::{Repo, create_parent};
use super::client::{Client, Range, header, public, unreachable};
use super::error::HubError;
use super::name::BlobId;
use super::progress::Progress;

/// Bytes that are read at once.
const PIECE: usize = 1 << 18;

/// A file of a model.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    /// The model.
    pub(super) model: String,
    /// The file's path in the repository.
    pub(super) file: String,
    pub(super) url: Url,
    pub(super) id: BlobId,
    pub(super) size: u64,
}

/// Downloads the contents of a file into the cache, unless they are there.
pub(super) fn download(client: &Client, repo: &Repo, wanted: &Wanted, progress: &mut Progress) -> Result<(), HubError> {
    if repo.has_blob(&wanted.id, wanted.size) {
        return Ok(());
    }
    let _locked = repo.lock(&wanted.id)?;
    // Another process may have done it in the meantime.
    if repo.has_blob(&wanted.id, wanted.size) {
        return Ok(());
    }
    let mut partial = Partial::open(repo.incomplete(&wanted.id), wanted)?;
    progress.start(&wanted.file, partial.length);
    let mut tries = client.tries();
    while partial.length < wanted.size {
        let before = partial.length;
        if let Err(error) = receive(client, wanted, &mut partial, progress) {
            if partial.length > before {
                tries.renew();
            }
            tries.pause(error)?;
        }
    }
    partial.finish(wanted, &repo.blob(&wanted.id))
}

/// Bytes of a file that a download still has to fetch.
pub(super) fn missing(repo: &Repo, wanted: &Wanted) -> u64 {
    if repo.has_blob(&wanted.id, wanted.size) {
        return 0;
    }
    let there = fs::metadata(repo.incomplete(&wanted.id)).map_or(0, |about| about.len());
    wanted.size.saturating_sub(if there > wanted.size { 0 } else { there })
}

/// Asks for what is missing, and appends what arrives.
fn receive(client: &Client, wanted: &Wanted, partial: &mut Partial, progress: &mut Progress) -> Result<(), HubError> {
    let Wanted { url, size, .. } = wanted;
    let range = (partial.length > 0).then_some(Range { first: partial.length, last: None });
    let response = client.get(url, range)?;
    let continues = || {
        let expected = format!("bytes {}-{}/{size}", partial.length, size - 1);
        response.status() == 206 && header(response.headers(), "content-range") == expected
    };
    if partial.length > 0 && !continues() {
        // The whole file, or another part of it.
        partial.restart()?;
        progress.start(&wanted.file, 0);
        if response.status() != 200 {
            return Err(unreachable(url, format!("status {} instead of the rest of the file", response.status())));
        }
    }
    let mut body = response.into_body().into_reader();
    let mut piece = vec![0; PIECE];
    while partial.length < *size {
        let count = match body.read(&mut piece) {
            Ok(0) => {
                let length = partial.length;
                return Err(unreachable(url, format!("the connection ended after {length} of {size} bytes")));
            }
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => {
                let length = partial.length;
                return Err(unreachable(url, format!("the connection failed after {length} of {size} bytes: {error}")));
            }
        };
        if count as u64 > size - partial.length {
            partial.remove();
            return Err(HubError::Answer {
                url: public(url),
                reason: format!("it has more than the {size} bytes listed"),
            });
        }
        partial.append(&piece[..count])?;
        progress.add(count as u64);
    }
    Ok(())
}

/// The beginning of a file.
struct Partial {
    path: PathBuf,
    file: File,
    length: u64,
    digest: Hasher,
    id: BlobId,
    size: u64,
}

impl Partial {
    /// Opens what an earlier download has left, and reads it for the digest.
    fn open(path: PathBuf, wanted: &Wanted) -> Result<Self, HubError> {
        create_parent(&path)?;
        let file = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path);
        let file = file.map_err(HubError::at(&path))?;
        let (id, size) = (wanted.id.clone(), wanted.size);
        let digest = Hasher::new(&id, size);
        let mut partial = Self { path, file, length: 0, digest, id, size };
        let mut piece = vec![0; PIECE];
        loop {
            let count = partial.file.read(&mut piece).map_err(HubError::at(&partial.path))?;
            if count == 0 {
                return Ok(partial);
            }
            partial.length += count as u64;
            if partial.length > size {
                partial.restart()?;
                return Ok(partial);
            }
            partial.digest.update(&piece[..count]);
        }
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), HubError> {
        self.file.write_all(bytes).map_err(HubError::at(&self.path))?;
        self.length += bytes.len() as u64;
        self.digest.update(bytes);
        Ok(())
    }

    /// Throws away what is there.
    fn restart(&mut self) -> Result<(), HubError> {
        self.file = File::create(&self.path).map_err(HubError::at(&self.path))?;
        (self.length, self.digest) = (0, Hasher::new(&self.id, self.size));
        Ok(())
    }

    fn remove(&self) {
        // It is checked again if it cannot be removed.
        let _ = fs::remove_file(&self.path);
    }

    /// Checks the digest, and gives the file its name.
    fn finish(self, wanted: &Wanted, path: &Path) -> Result<(), HubError> {
        if self.digest.clone().hex() != self.id.text() {
            self.remove();
            let Wanted { model, file, id, .. } = wanted;
            let expected = id.text().into();
            return Err(HubError::Digest { model: model.clone(), file: file.clone(), expected });
        }
        self.file.sync_all().map_err(HubError::at(&self.path))?;
        fs::rename(&self.path, path).map_err(HubError::at(path))
    }
}

/// The digest of which contents have their name.
#[derive(Clone)]
enum Hasher {
    Git(Sha1),
    Sha256(Sha256),
}

impl Hasher {
    fn new(id: &BlobId, size: u64) -> Self {
        match id {
            // Git's digest begins with the length.
            BlobId::Git(_) => Self::Git(Sha1::new().chain_update(format!("blob {size}\0"))),
            BlobId::Sha256(_) => Self::Sha256(Sha256::new()),
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Git(digest) => digest.update(bytes),
            Self::Sha256(digest) => digest.update(bytes),
        }
    }

    fn hex(self) -> String {
        match self {
            Self::Git(digest) => hex(&digest.finalize()),
            Self::Sha256(digest) => hex(&digest.finalize()),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .filter_map(|digit| char::from_digit(digit.into(), 16))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_have_the_names_that_git_and_sha256sum_give_them() {
        let of = |id: BlobId, text: &str| {
            let mut digest = Hasher::new(&id, text.len() as u64);
            digest.update(text.as_bytes());
            digest.hex()
        };
        // `printf 'hello\n' | git hash-object --stdin`
        let git = BlobId::git(&"0".repeat(40)).unwrap();
        assert_eq!(of(git, "hello\n"), "ce013625030ba8dba906f756967f9e9ca394464a");
        let sha256 = of(BlobId::sha256(&"0".repeat(64)).unwrap(), "abc");
        assert!(sha256.starts_with("ba7816bf8f01cfea414140de5dae2223"), "{sha256}");
    }
}
