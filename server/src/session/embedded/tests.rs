//! Runs the tests that every index must pass on the embedded index.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tempfile::TempDir;

use super::index::EmbeddedIndex;
use crate::session::disk::SystemDisk;
use crate::session::id::Owner;
use crate::session::index::tests::{conforms, excludes, interleaves};
use crate::session::index::{Index, NewReceipt};

fn open(folder: Option<&Path>) -> Arc<dyn Index> {
    let index =
        EmbeddedIndex::open(Arc::new(SystemDisk), folder, false, &|_, _| true, Box::new(|_| {}), Box::new(|| Ok(())));
    Arc::new(index.expect("an index"))
}

#[test]
fn closing_makes_everything_durable() {
    crate::sync::block_on(async {
        let (folder, synced) = (TempDir::new().expect("a folder"), Arc::new(AtomicUsize::new(0)));
        let counter = Arc::clone(&synced);
        let sync_objects = Box::new(move || {
            counter.fetch_add(1, Ordering::SeqCst);
            Ok(())
        });
        let (disk, freed) = (Arc::new(SystemDisk), Box::new(|_: &[_]| {}));
        let index = EmbeddedIndex::open(disk, Some(folder.path()), false, &|_, _| true, freed, sync_objects);
        let index = index.expect("an index");
        let receipt = NewReceipt { key: "key".to_owned(), now: 0, ends: 9, answer: Vec::new() };
        index.put_receipt(Owner([1; 16]), receipt).await.expect("it is stored");
        let before = synced.load(Ordering::SeqCst);
        index.close().await.expect("the index closes");
        // Objects are synced just before the index that names them.
        assert_eq!((before, synced.load(Ordering::SeqCst)), (0, 1));
    });
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

#[test]
fn turns_on_two_servers_are_safe_in_every_order() {
    crate::sync::block_on(interleaves(true, open(None)));
}
