//! Only the server's own user can read what it stores.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::live::Server;

/// Returns `folder` and everything below it.
fn all(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let below = entries.flat_map(|path| if path.is_dir() { all(&path) } else { vec![path] });
    std::iter::once(folder.to_owned()).chain(below).collect()
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn only_the_servers_user_can_read_sessions_and_folders_of_earlier_versions_are_closed() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    let server = Server::start(&data, &[]);
    server.json("POST", "/v1/sessions", &json!({"text": "Once upon a time"}));
    server.kill();
    let open: Vec<_> = all(&data).into_iter().filter(|path| mode(path) & 0o077 != 0).collect();
    assert!(open.is_empty(), "readable by others: {open:?}");

    let store = fs::read_dir(data.join("sessions")).unwrap().next().unwrap().unwrap().path();
    fs::set_permissions(&store, fs::Permissions::from_mode(0o755)).unwrap();
    Server::start(&data, &[]).kill();
    assert_eq!(mode(&store), 0o700);
}
