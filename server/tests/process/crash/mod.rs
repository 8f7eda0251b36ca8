//! A server that is killed at random times: everything acknowledged survives, nothing else exists, and the texts
//! continue as if nothing had happened.
//!
//! `TIDEGATE_KILLS=300 cargo test -p tidegate-server --test process crash -- --nocapture` runs the long form.
//! `TIDEGATE_SEED` repeats the kill times of a run, as far as the machine's timing allows.

mod full;
mod lane;
mod script;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, RwLock};
use std::time::{Duration, Instant};

use crate::live::{self, Server, get};
use lane::Lane;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Number of sessions used at once.
const LANES: usize = 4;

const FLAGS: &[&str] = &["--slots", "4", "--keep-versions", "8", "--threads", "1"];

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |value| value.parse().expect(name))
}

/// The lanes, and the address of the server while it runs. A client holds its lock until it has the answer.
struct World {
    lanes: Vec<Mutex<Lane>>,
    address: RwLock<String>,
    over: AtomicBool,
}

impl World {
    fn new() -> Self {
        let lanes = (0..LANES).map(|number| Mutex::new(Lane::new(number))).collect();
        Self { lanes, address: RwLock::default(), over: AtomicBool::new(false) }
    }

    /// Runs a lane's steps until `done`, repeating each as often as necessary.
    fn walk(&self, lane: &Mutex<Lane>, done: impl Fn(usize) -> bool) {
        loop {
            // The lock is poisoned by a failed check, which reports itself.
            let Ok(address) = self.address.read() else { return };
            if done(lane.lock().unwrap().steps()) {
                return;
            }
            let request = lane.lock().unwrap().next();
            // An error means that the server was killed. The lock is then taken until its successor's address is known.
            if let Ok(reply) = request.send(&address) {
                lane.lock().unwrap().answered(&reply);
            } else {
                drop(address);
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Checks every lane against the server while no client uses it. Returns the number of sessions that belong to no
    /// lane: a crash may have lost the acknowledgement of a new session.
    fn check(&self, address: &str) -> usize {
        let mut known = BTreeSet::new();
        let mut open = 0;
        for lane in &self.lanes {
            let lane = lane.lock().unwrap();
            lane.check(address);
            open += lane.may_have_made_sessions();
            known.extend(lane.sessions());
        }
        let strangers: Vec<String> = sessions(address).into_iter().filter(|id| !known.contains(id)).collect();
        assert!(strangers.len() <= open, "{open} sessions may have been made, these are there: {strangers:?}");
        strangers.len()
    }
}

/// Returns the ids of all sessions on a server.
fn sessions(address: &str) -> Vec<String> {
    let (mut found, mut after) = (Vec::new(), String::new());
    loop {
        let page = get(address, &format!("/v1/sessions?limit=100&order=asc{after}")).unwrap().json();
        let ids = page["data"].as_array().unwrap().iter().map(|session| session["id"].as_str().unwrap().to_owned());
        found.extend(ids);
        if page["has_more"] == false {
            return found;
        }
        after = format!("&after={}", page["last_id"].as_str().unwrap());
    }
}

/// Stops the lanes, however the test ends.
struct Over<'a>(&'a World);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.over.store(true, Ordering::SeqCst);
    }
}

/// Starts the server and kills it before it is ready, or soon after.
fn kill_early(data: &Path, pause: Duration) {
    let mut child = live::spawn(data, FLAGS);
    std::thread::sleep(pause);
    child.kill().unwrap();
    child.wait().unwrap();
}

fn percentile(times: &mut [Duration], percent: usize) -> Duration {
    times.sort_unstable();
    times[(times.len() - 1) * percent / 100]
}

#[test]
fn a_server_killed_at_any_time_keeps_acknowledged_turns_and_continues_with_the_same_tokens() {
    let (kills, seed) = (setting("TIDEGATE_KILLS", 12), setting("TIDEGATE_SEED", rand::rng().random()));
    println!("{kills} kills, TIDEGATE_SEED={seed}");
    let folder = tempfile::tempdir().unwrap();
    let (world, mut random) = (World::new(), StdRng::seed_from_u64(seed));
    let (began, mut starts, mut early) = (Instant::now(), Vec::new(), 0);
    std::thread::scope(|scope| {
        let data = folder.path().join("killed");
        std::fs::create_dir(&data).unwrap();
        let _over = Over(&world);
        let mut gate = Some(world.address.write().unwrap());
        for lane in &world.lanes {
            scope.spawn(|| world.walk(lane, |_| world.over.load(Ordering::SeqCst)));
        }
        for kill in 0..=kills {
            if kill % 8 == 7 {
                kill_early(&data, Duration::from_micros(random.random_range(0..200_000)));
                early += 1;
            }
            let server = Server::start(&data, FLAGS);
            starts.push(server.start_up);
            world.check(&server.address);
            let mut address = gate.take().unwrap_or_else(|| world.address.write().unwrap());
            address.clone_from(&server.address);
            drop(address);
            std::thread::sleep(Duration::from_micros(random.random_range(0..600_000)));
            if kill < kills {
                server.kill();
                // Waits until no lane has a request in flight.
                gate = Some(world.address.write().unwrap());
            } else {
                world.over.store(true, Ordering::SeqCst);
                drop(world.address.write().unwrap());
                let strangers = world.check(&server.address);
                println!("{strangers} sessions were created but not acknowledged");
                let heads = world.lanes.iter().map(|lane| lane.lock().unwrap().head(&server.address)).collect();
                uninterrupted(&folder.path().join("whole"), &world, heads);
            }
            if kill % 20 == 19 {
                let steps: usize = world.lanes.iter().map(|lane| lane.lock().unwrap().steps()).sum();
                println!("{} kills, {steps} steps acknowledged, {:.0?}", kill + 1, began.elapsed());
            }
        }
    });
    let lanes = || world.lanes.iter().map(|lane| lane.lock().unwrap());
    let (steps, resent): (usize, usize) =
        (lanes().map(|lane| lane.steps()).sum(), lanes().map(|lane| lane.resent).sum());
    let replayed: usize = lanes().map(|lane| lane.found).sum();
    println!(
        "{kills} kills of a running server and {early} of a starting one in {:.0?}: {steps} steps acknowledged and \
         kept; {resent} were sent again, {replayed} of them had been committed; ready again after {:.0?} (median), \
         {:.0?} at most",
        began.elapsed(),
        percentile(&mut starts, 50),
        percentile(&mut starts, 100),
    );
}

/// Runs the same steps on a server that is never killed, and compares texts and heads byte for byte.
fn uninterrupted(data: &Path, killed: &World, heads: Vec<Vec<u8>>) {
    std::fs::create_dir(data).unwrap();
    let server = Server::start(data, FLAGS);
    let whole = World::new();
    whole.address.write().unwrap().clone_from(&server.address);
    std::thread::scope(|scope| {
        for (lane, killed) in whole.lanes.iter().zip(&killed.lanes) {
            let (whole, steps) = (&whole, killed.lock().unwrap().steps());
            scope.spawn(move || whole.walk(lane, |done| done == steps));
        }
    });
    for ((lane, killed), head) in whole.lanes.iter().zip(&killed.lanes).zip(heads) {
        let (lane, killed) = (lane.lock().unwrap(), killed.lock().unwrap());
        lane.assert_same(&killed);
        assert!(lane.head(&server.address) == head, "the heads of lane {} differ", lane.number);
    }
}
