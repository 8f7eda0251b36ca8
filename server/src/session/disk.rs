//! The file system, as the store uses it. Tests replace it with file systems that fail, fill up or lose power.

use std::fmt::Debug;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Arc;

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// An existing file, for reading.
    Read,
    /// An existing file, for reading and writing.
    Write,
    /// A file for reading and writing; created if it does not exist, readable only by this user.
    Create,
    /// Same as [`Self::Create`], but truncated.
    Replace,
}

/// A file system.
pub trait Disk: Debug + Send + Sync {
    /// Opens a file.
    ///
    /// # Errors
    /// The file does not exist, or the disk fails.
    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<Arc<dyn DiskFile>>;

    /// Returns whether a file or folder exists.
    ///
    /// # Errors
    /// The disk fails.
    fn exists(&self, path: &Path) -> io::Result<bool>;

    /// Renames a file, replacing any existing one. The rename is atomic, and durable once the folder is synced.
    ///
    /// # Errors
    /// The file does not exist, or the disk fails.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file.
    ///
    /// # Errors
    /// The file does not exist, or the disk fails.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Returns the names in a folder.
    ///
    /// # Errors
    /// The folder does not exist, or the disk fails.
    fn names(&self, folder: &Path) -> io::Result<Vec<String>>;

    /// Creates a folder that only this user can read, and its missing parents.
    ///
    /// # Errors
    /// The disk fails.
    fn make_folder(&self, folder: &Path) -> io::Result<()>;

    /// Syncs a folder, so that the names of its files are durable.
    ///
    /// # Errors
    /// The disk fails.
    fn sync_folder(&self, folder: &Path) -> io::Result<()>;
}

/// An open file.
#[allow(clippy::len_without_is_empty, reason = "an empty file is nothing special")]
pub trait DiskFile: Debug + Send + Sync {
    /// Returns the file's length in bytes.
    ///
    /// # Errors
    /// The disk fails.
    fn len(&self) -> io::Result<u64>;

    /// Fills `buffer` with the bytes starting at `offset`.
    ///
    /// # Errors
    /// The file ends too early, or the disk fails.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;

    /// Writes all `bytes` at `offset`.
    ///
    /// # Errors
    /// The disk is full or fails; some of the bytes may be written.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Truncates the file, or extends it with zeros.
    ///
    /// # Errors
    /// The disk is full or fails.
    fn set_len(&self, length: u64) -> io::Result<()>;

    /// Syncs the file's content and length to disk.
    ///
    /// # Errors
    /// The disk fails; which of the latest writes are on disk is then unknown.
    fn sync(&self) -> io::Result<()>;

    /// Locks the file until this value is dropped; returns false if another process or value has locked it.
    ///
    /// # Errors
    /// The disk fails.
    fn try_lock(&self) -> io::Result<bool>;

    /// Returns whether `path` still leads to this file.
    ///
    /// # Errors
    /// The disk fails.
    fn is_at(&self, path: &Path) -> io::Result<bool>;
}

/// The file system of the machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemDisk;

impl Disk for SystemDisk {
    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<Arc<dyn DiskFile>> {
        let mut options = OpenOptions::new();
        options.read(true).write(mode != OpenMode::Read).mode(0o600);
        options.create(matches!(mode, OpenMode::Create | OpenMode::Replace)).truncate(mode == OpenMode::Replace);
        Ok(Arc::new(options.open(path)?))
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        path.try_exists()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn names(&self, folder: &Path) -> io::Result<Vec<String>> {
        fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }

    fn make_folder(&self, folder: &Path) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)
    }

    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        File::open(folder)?.sync_all()
    }
}

impl DiskFile for File {
    fn len(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_exact_at(buffer, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.write_all_at(bytes, offset)
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        File::set_len(self, length)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }

    fn try_lock(&self) -> io::Result<bool> {
        match File::try_lock(self) {
            Ok(()) => Ok(true),
            Err(TryLockError::WouldBlock) => Ok(false),
            // On a file system without locks, nothing shows that another process has the file locked.
            Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Unsupported => Ok(true),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    fn is_at(&self, path: &Path) -> io::Result<bool> {
        let (open, found) = (self.metadata()?, fs::metadata(path));
        Ok(found.is_ok_and(|found| (found.dev(), found.ino()) == (open.dev(), open.ino())))
    }
}

/// Reads a whole file.
pub(crate) fn read(disk: &dyn Disk, path: &Path) -> io::Result<Vec<u8>> {
    let file = disk.open(path, OpenMode::Read)?;
    let mut bytes = vec![0; file.len()? as usize];
    file.read_at(&mut bytes, 0)?;
    Ok(bytes)
}

/// Writes a file under a temporary name, syncs it, and renames it. The folder is not synced.
pub(crate) fn write(disk: &dyn Disk, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // If this process dies, the sweep removes files with such names.
    let new = path.with_file_name(format!("{name}#0"));
    let file = disk.open(&new, OpenMode::Replace)?;
    file.write_at(bytes, 0)?;
    file.sync()?;
    disk.rename(&new, path)
}

/// Creates a folder of the machine and its missing ancestors; with `sync`, syncs them to disk.
pub(crate) fn make_folder(folder: &Path, sync: bool) -> io::Result<()> {
    let existing = folder.ancestors().find(|above| !above.as_os_str().is_empty() && above.exists());
    fs::create_dir_all(folder)?;
    if !sync {
        return Ok(());
    }
    // A folder's name is on disk once its parent is synced. Ancestors that already existed may have just been created
    // by another process, so they are synced as well, if they can be opened.
    for ancestor in folder.ancestors() {
        let synced = SystemDisk.sync_folder(ancestor);
        if existing.is_none_or(|existing| ancestor.starts_with(existing)) {
            synced?;
        }
    }
    Ok(())
}

/// Reads or writes a file sequentially from its start.
pub(crate) struct Stream<'f> {
    file: &'f dyn DiskFile,
    at: u64,
}

impl<'f> Stream<'f> {
    pub(crate) fn new(file: &'f dyn DiskFile) -> Self {
        Self { file, at: 0 }
    }
}

impl Read for Stream<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.len()?.saturating_sub(self.at).min(buffer.len() as u64) as usize;
        self.file.read_at(&mut buffer[..count], self.at)?;
        self.at += count as u64;
        Ok(count)
    }
}

impl Write for Stream<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write_at(bytes, self.at)?;
        self.at += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
