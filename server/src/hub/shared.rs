//! Files and folders of the cache, which other users and programs may share, also where this process keeps its own files
//! private by its mask.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::OnceLock;

use rustix::fs::Mode;

use super::error::HubError;

/// The mask with which the process was started, if it has another one now.
static MASK: OnceLock<Mode> = OnceLock::new();

/// Modes without a mask.
const FILE: u32 = 0o666;
const FOLDER: u32 = 0o777;

/// Gives what is created in the cache the permissions of this mask, and not of the one that the process has now.
pub(crate) fn share_cache(mask: Mode) {
    // Later calls change nothing: the first mask is that of the start.
    let _ = MASK.set(mask);
}

/// Creates a file that is not there.
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

/// Creates the folders in which a path lies.
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
        // Also one that another process has just created, or that cannot be created because there is a link.
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
