//! Downloads a file. An interrupted download is resumed, and the file is kept only if its digest is the one that the
//! hub lists.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use sha1::Sha1;
use sha2::{Digest, Sha256};
use tidegate_server::session::hex;
use tracing::warn;
use url::Url;

use super::address::public;
use super::cache::Repo;
use super::client::{Client, Range, header, unreachable};
use super::error::HubError;
use super::name::BlobId;
use super::progress::Progress;
use super::shared::{create_new, create_parent, open_or_create};

/// Number of bytes read at once.
const PIECE: usize = 1 << 18;
/// Number of new bytes after which all tries are restored. So a server that sends only a few bytes per response is
/// given up on.
const PROGRESS: u64 = 1 << 20;

/// A file to download.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    /// The name of the model.
    pub(super) model: String,
    /// The file's path in the repository.
    pub(super) file: String,
    pub(super) url: Url,
    pub(super) id: BlobId,
    pub(super) size: u64,
}

/// Downloads the contents of a file into the cache, unless they are already there.
pub(super) fn download(client: &Client, repo: &Repo, wanted: &Wanted, progress: &mut Progress) -> Result<(), HubError> {
    if repo.has_blob(&wanted.id, wanted.size) {
        return Ok(());
    }
    let _locked = repo.lock(&wanted.id)?;
    // Another process may have downloaded it in the meantime.
    if repo.has_blob(&wanted.id, wanted.size) {
        return Ok(());
    }
    let mut partial = Partial::open(repo.incomplete(&wanted.id))?;
    if partial.length > wanted.size {
        partial.restart()?;
    }
    progress.start(&wanted.file, partial.length);
    loop {
        fill(client, wanted, &mut partial, progress)?;
        match partial.finish(wanted, &repo.blob(&wanted.id)) {
            // The wrong bytes may come from an earlier download.
            Err(error @ HubError::Digest { .. }) if partial.resumed => {
                warn!("downloading {} once more from its beginning: {error}", wanted.file);
                partial.restart()?;
                progress.start(&wanted.file, 0);
            }
            finished => return finished,
        }
    }
}

/// Fetches the missing bytes, retrying as often as necessary while there is progress.
fn fill(client: &Client, wanted: &Wanted, partial: &mut Partial, progress: &mut Progress) -> Result<(), HubError> {
    let (mut tries, mut reached) = (client.tries(), partial.length);
    while partial.length < wanted.size {
        if let Err(error) = receive(client, wanted, partial, progress) {
            if partial.length >= reached.saturating_add(PROGRESS) {
                reached = partial.length;
                tries.renew();
            }
            tries.pause(error)?;
        }
    }
    Ok(())
}

/// Returns the number of bytes of a file that still have to be downloaded.
pub(super) fn missing(repo: &Repo, wanted: &Wanted) -> u64 {
    if repo.has_blob(&wanted.id, wanted.size) {
        return 0;
    }
    let there = fs::metadata(repo.incomplete(&wanted.id)).map_or(0, |about| about.len());
    wanted.size.saturating_sub(if there > wanted.size { 0 } else { there })
}

/// Requests the missing bytes, and appends what arrives.
fn receive(client: &Client, wanted: &Wanted, partial: &mut Partial, progress: &mut Progress) -> Result<(), HubError> {
    let Wanted { url, size, .. } = wanted;
    let range = (partial.length > 0).then_some(Range { first: partial.length, last: None });
    let response = client.get(url, range)?;
    let continues = || {
        let expected = format!("bytes {}-{}/{size}", partial.length, size - 1);
        response.status() == 206 && header(response.headers(), "content-range") == expected
    };
    if partial.length > 0 && !continues() {
        // The server sends the whole file, or another part of it.
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
            partial.remove()?;
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

/// A partly downloaded file.
///
/// If the file system's locks do not work, another process may have the file open too. So existing bytes are never
/// changed in place, only deleted, and the digest is computed from the file, not from the bytes that this process
/// received.
struct Partial {
    path: PathBuf,
    file: File,
    length: u64,
    /// Whether some of its bytes are from an earlier download.
    resumed: bool,
}

impl Partial {
    /// Opens the file that an earlier download left, or creates it.
    fn open(path: PathBuf) -> Result<Self, HubError> {
        create_parent(&path)?;
        let mut file = open_or_create(&path).map_err(HubError::at(&path))?;
        let length = file.seek(SeekFrom::End(0)).map_err(HubError::at(&path))?;
        Ok(Self { path, file, length, resumed: length > 0 })
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), HubError> {
        self.file.write_all(bytes).map_err(HubError::at(&self.path))?;
        self.length += bytes.len() as u64;
        Ok(())
    }

    /// Discards the bytes and starts a new file.
    fn restart(&mut self) -> Result<(), HubError> {
        self.remove()?;
        self.file = create_new(&self.path).map_err(HubError::at(&self.path))?;
        (self.length, self.resumed) = (0, false);
        Ok(())
    }

    fn remove(&self) -> Result<(), HubError> {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(HubError::at(&self.path)(error)),
            _ => Ok(()),
        }
    }

    /// Checks the digest, and renames the file to `path`.
    fn finish(&mut self, wanted: &Wanted, path: &Path) -> Result<(), HubError> {
        let Wanted { model, file, id, size, .. } = wanted;
        self.file.sync_all().map_err(HubError::at(&self.path))?;
        // Open the file again: on a network share, bytes that another machine has written only show then.
        let mut written = File::open(&self.path).map_err(HubError::at(&self.path))?;
        if !is_same(&written, &self.file).map_err(HubError::at(&self.path))? {
            let text =
                "another process has replaced it: the file system has no locks; download the model with one process";
            return Err(HubError::at(&self.path)(io::Error::other(text)));
        }
        let mut digest = Hasher::new(id, *size);
        io::copy(&mut written, &mut digest).map_err(HubError::at(&self.path))?;
        if digest.hex() != id.text() {
            self.remove()?;
            let expected = id.text().into();
            return Err(HubError::Digest { model: model.clone(), file: file.clone(), expected });
        }
        fs::rename(&self.path, path).map_err(HubError::at(path))
    }
}

/// Returns whether two open files are the same file.
fn is_same(one: &File, other: &File) -> io::Result<bool> {
    let (one, other) = (one.metadata()?, other.metadata()?);
    Ok((one.dev(), one.ino()) == (other.dev(), other.ino()))
}

/// Computes the digest that names the contents.
enum Hasher {
    Git(Sha1),
    Sha256(Sha256),
}

impl Hasher {
    fn new(id: &BlobId, size: u64) -> Self {
        match id {
            // Git's digest starts with the length.
            BlobId::Git(_) => Self::Git(Sha1::new().chain_update(format!("blob {size}\0"))),
            BlobId::Sha256(_) => Self::Sha256(Sha256::new()),
        }
    }

    fn hex(self) -> String {
        match self {
            Self::Git(digest) => hex(&digest.finalize()),
            Self::Sha256(digest) => hex(&digest.finalize()),
        }
    }
}

impl Write for Hasher {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Git(digest) => digest.update(bytes),
            Self::Sha256(digest) => digest.update(bytes),
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::net::TcpListener;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::hub::settings::{Patience, Settings};

    /// Downloads a file of zeros from a server that sends `step` bytes in each response, with a client that tries three
    /// times.
    fn in_pieces(step: usize, size: usize) -> HubError {
        const PAUSES: [Duration; 2] = [Duration::ZERO; 2];
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        thread::spawn(move || {
            for mut socket in listener.incoming().flatten() {
                let lines = BufReader::new(&socket).lines().map_while(Result::ok);
                let mut range = lines.take_while(|line| !line.is_empty()).filter_map(|line| {
                    line.to_lowercase().strip_prefix("range: bytes=")?.strip_suffix('-')?.parse::<usize>().ok()
                });
                let first = range.next();
                let (status, first) = (if first.is_some() { 206 } else { 200 }, first.unwrap_or_default());
                let (last, length) = (size - 1, size - first);
                let range = format!("content-range: bytes {first}-{last}/{size}\r\ncontent-length: {length}");
                // The client may have closed the connection.
                let _ = write!(socket, "HTTP/1.1 {status} x\r\n{range}\r\nconnection: close\r\n\r\n");
                let _ = socket.write_all(&vec![0; step.min(length)]);
            }
        });
        let cache = tempfile::tempdir().unwrap();
        let value = |name: &str| match name {
            "HF_ENDPOINT" => Some(address.clone().into()),
            "HF_HOME" => Some(cache.path().into()),
            _ => None,
        };
        let settings = Settings::from_variables(value).unwrap();
        let settings = Settings { patience: Patience { pauses: &PAUSES, ..settings.patience }, ..settings };
        let id = BlobId::sha256(&"0".repeat(64)).unwrap();
        let url = Url::parse(&address).unwrap();
        let wanted = Wanted { model: "org/name".into(), file: "x".into(), url, id, size: size as u64 };
        let repo = Repo::new(cache.path(), "org/name");
        let mut progress = Progress::hidden("org/name", wanted.size, 0);
        download(&Client::new(&settings).unwrap(), &repo, &wanted, &mut progress).unwrap_err()
    }

    #[test]
    fn tries_are_counted_anew_after_a_mebibyte() {
        let error = in_pieces(1, 100).to_string();
        assert!(error.contains("after 3 of 100 bytes"), "{error}");
        // All zeros arrive, but their digest is not the expected one.
        let error = in_pieces(1 << 20, 5 << 20);
        assert!(matches!(error, HubError::Digest { .. }), "{error}");
    }

    #[test]
    fn contents_have_the_names_that_git_and_sha256sum_give_them() {
        let of = |id: BlobId, text: &str| {
            let mut digest = Hasher::new(&id, text.len() as u64);
            digest.write_all(text.as_bytes()).unwrap();
            digest.hex()
        };
        // `printf 'hello\n' | git hash-object --stdin`
        let git = BlobId::git(&"0".repeat(40)).unwrap();
        assert_eq!(of(git, "hello\n"), "ce013625030ba8dba906f756967f9e9ca394464a");
        let sha256 = of(BlobId::sha256(&"0".repeat(64)).unwrap(), "abc");
        assert!(sha256.starts_with("ba7816bf8f01cfea414140de5dae2223"), "{sha256}");
    }
}
