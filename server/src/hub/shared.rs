//! Creates files and folders in the cache, which other users and programs may share even though this process's umask
//! keeps its own files private.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::OnceLock;

use rustix::fs::Mode;

use super::error::HubError;

/// The umask with which the process was started, if it has been changed since.
static MASK: OnceLock<Mode> = OnceLock::new();

/// File modes before the umask is applied.
const FILE: u32 = 0o666;
const FOLDER: u32 = 0o777;

/// Makes files created in the cache use this umask, and not the current one of the process.
pub(crate) fn share_cache(mask: Mode) {
    // Later calls change nothing: the first umask is the one from the start of the process.
    let _ = MASK.set(mask);
}

/// Creates a file that does not exist yet.
pub(super) fn create_new(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().create_new(true).read(true).write(true).open(path)?;
    share(path, FILE)?;
    Ok(file)
}

/// Opens a file, or creates it.
pub(super) fn open_or_create(path: &Path) -> io::Result<File> {
    match create_new(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path)
        }
        created => created,
    }
}

/// Creates the parent folders of a path.
pub(super) fn create_parent(path: &Path) -> Result<(), HubError> {
    let parent = path.parent().unwrap_or(path);
    create_folders(parent).map_err(HubError::at(parent))
}

fn create_folders(path: &Path) -> io::Result<()> {
    match DirBuilder::new().create(path) {
        Ok(()) => share(path, FOLDER),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            create_folders(path.parent().ok_or(error)?)?;
            create_folders(path)
        }
        // Another process has just created the folder, or the path is a link to one.
        Err(_) if path.is_dir() => Ok(()),
        Err(error) => Err(error),
    }
}

fn share(path: &Path, mode: u32) -> io::Result<()> {
    MASK.get().map_or(Ok(()), |mask| set_mode(path, mode, *mask))
}

fn set_mode(path: &Path, mode: u32, mask: Mode) -> io::Result<()> {
    fs::set_permissions(path, Permissions::from_mode(mode & !mask.bits()))
}
