//! A process that is killed at random times. Acknowledged turns survive, and nothing else appears.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use tidegate_server::session::{ReceiptKey, SessionId, StoreOptions, VersionId};

use crate::kit::{ANN, SOON, agree, empty, in_folder, list, note, open, snapshot};

const FOLDER: &str = "TIDEGATE_TEST_STORE";
const SESSIONS: usize = 4;

fn options(folder: &Path) -> StoreOptions {
    StoreOptions { keep_versions: 3, ..in_folder(folder) }
}

fn receipt_key(id: &SessionId, number: u64) -> ReceiptKey {
    ReceiptKey(format!("{id}-{number}"))
}

/// Runs as the process that is killed. Prints `+ session number` before each commit and `= session number` after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn child_to_be_killed() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let store = open(options(Path::new(&folder))).await;
    let (mut sessions, _) = list(&store, ANN, None, 100, false).await.expect("a list");
    while sessions.len() < SESSIONS {
        sessions.push(store.create(ANN, empty()).await.expect("a session"));
    }
    let turns = sessions.into_iter().map(|session| {
        let store = store.clone();
        tokio::spawn(async move {
            loop {
                let turn = store.begin(ANN, &session.id, None, SOON).await.expect("a turn");
                let number = turn.session().head.tokens;
                println!("\n+ {} {number}", session.id);
                let receipt = Some((receipt_key(&session.id, number), number.to_string().into_bytes()));
                turn.commit(snapshot(number), note(), receipt, VersionId::new()).await.expect("a commit");
                println!("\n= {} {number}", session.id);
            }
        })
    });
    futures_util::future::join_all(turns).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_process_loses_no_turn_that_it_acknowledged() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut acknowledged = 0;
    for round in 0..12u64 {
        let mut child = Command::new(std::env::current_exe().expect("this program"));
        child.args(["crash::child_to_be_killed", "--exact", "--nocapture", "--test-threads=1"]);
        let mut child =
            child.env(FOLDER, folder.path()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("a child");
        let output = child.stdout.take().expect("its output");
        let (first, acknowledges) = std::sync::mpsc::channel();
        let reader = std::thread::spawn(move || {
            let lines = BufReader::new(output).lines().map_while(Result::ok);
            let seen = lines.inspect(|line| {
                if line.starts_with("= ") {
                    // Nobody waits for it in even rounds.
                    let _ = first.send(());
                }
            });
            seen.collect::<Vec<_>>()
        });
        // Every second child is killed only after it has acknowledged a turn.
        if round % 2 == 1 {
            tokio::task::block_in_place(|| acknowledges.recv_timeout(SOON)).expect("an acknowledged turn");
        }
        tokio::time::sleep(Duration::from_millis(120 + 37 * round)).await;
        child.kill().expect("killed");
        child.wait().expect("gone");
        let lines = reader.join().expect("its lines");
        let last = |sign: &str, id: &SessionId| -> Option<u64> {
            let start = format!("{sign} {id} ");
            lines.iter().rev().find_map(|line| line.strip_prefix(&start)?.parse().ok())
        };
        let store = open(options(folder.path())).await;
        let (sessions, _) = list(&store, ANN, None, 100, false).await.expect("a list");
        for session in &sessions {
            let (head, found, _) = store.load(ANN, &session.id, None).await.expect("the head can be read");
            if let Some(number) = head.tokens.checked_sub(1).filter(|_| head.tokens > 0) {
                assert_eq!(found, snapshot(number));
                let receipt =
                    store.receipt(ANN, &receipt_key(&session.id, number).0).await.expect("read").expect("a receipt");
                assert_eq!(receipt, number.to_string().into_bytes(), "head and receipt come together");
            }
            let (begun, done) = (last("+", &session.id), last("=", &session.id));
            if let Some(done) = done {
                acknowledged += 1;
                assert!(head.tokens > done, "round {round}: {done} was acknowledged, {} is there", head.tokens);
            }
            if let Some(begun) = begun {
                assert!(head.tokens <= begun + 1, "round {round}: {begun} was begun, {} is there", head.tokens);
            }
        }
        // The sweep removes the child's unfinished work, and nothing else.
        let objects =
            object_store::local::LocalFileSystem::new_with_prefix(folder.path().join("objects")).expect("objects");
        let swept = async || {
            use futures_util::StreamExt as _;
            use object_store::ObjectStore as _;
            objects.list(None).count().await as u64 * crate::kit::BYTES == store.stats().disk_bytes
        };
        crate::kit::until("the sweep", swept).await;
        agree(&store, &objects, &[ANN], &[]).await;
        drop(store);
    }
    assert!(acknowledged > 0, "no child acknowledged a turn, so nothing was tested");
}
