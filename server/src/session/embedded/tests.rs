//! The tests of every index, on those of this folder.

use std::path::Path;
use std::sync::Arc;

use tempfile::TempDir;

use super::index::EmbeddedIndex;
use crate::session::disk::SystemDisk;
use crate::session::index::Index;
use crate::session::index::tests::{conforms, excludes};

fn open(folder: Option<&Path>) -> Arc<dyn Index> {
    let index =
        EmbeddedIndex::open(Arc::new(SystemDisk), folder, false, &|_, _| true, Box::new(|_| {}), Box::new(|| Ok(())));
    Arc::new(index.expect("an index"))
}

#[test]
fn an_index_in_memory_conforms() {
    conforms(64, false, || async || open(None));
    excludes(|| async || open(None));
}

#[test]
fn an_index_in_a_folder_conforms_and_lasts() {
    let start = || {
        let folder = TempDir::new().expect("a folder");
        async move || open(Some(folder.path()))
    };
    conforms(32, true, start);
    excludes(start);
}
