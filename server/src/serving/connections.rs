//! Tracks the open connections: how many there are, in total and per client, and which are idle. A new connection over
//! a limit replaces the one that has been idle longest; connections with a running request stay.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use futures_util::task::AtomicWaker;
use tokio::sync::Notify;

/// Number of leading bits of an IPv6 address that identify a client, which chooses the other bits itself.
const IPV6_PREFIX: u32 = 64;

/// The limits on open connections.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) total: usize,
    /// Limit per client; `None` means a quarter of the total, and no limit for programs on this machine, such as
    /// proxies.
    pub(super) per_peer: Option<usize>,
}

impl Limits {
    fn of(self, peer: IpAddr) -> usize {
        match self.per_peer {
            Some(limit) => limit,
            None if peer.is_loopback() => usize::MAX,
            None => (self.total / 4).max(1),
        }
    }
}

/// The open connections of a listener. Only one task, the one that accepts, may wait for admission.
#[derive(Debug)]
pub(super) struct Connections {
    limits: Limits,
    open: Mutex<Open>,
    /// Notified when a connection was closed or became idle, or when its client has read the rest of an answer.
    changed: Notify,
    refused: AtomicU64,
}

#[derive(Debug, Default)]
struct Open {
    by_id: HashMap<u64, Record>,
    /// Idle connections, in the order in which they became idle.
    idle: BTreeMap<u64, u64>,
    /// Number of connections of each client, without those told to close.
    by_peer: HashMap<IpAddr, usize>,
    /// Number of connections that were told to close but are still open.
    closing: usize,
    /// The last number given to a connection or to an idle period.
    next: u64,
}

#[derive(Debug)]
struct Record {
    peer: IpAddr,
    state: State,
    signal: Arc<Signal>,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// Before the first request or between two requests; the number is its place in the idle order.
    Idle(u64),
    Running,
    Closing,
}

/// State that the connection's own task reads.
#[derive(Debug, Default)]
struct Signal {
    closing: AtomicBool,
    /// Whether the end of an answer is still waiting for the client to read.
    blocked: AtomicBool,
    reader: AtomicWaker,
}

enum Admission {
    Open(Arc<Entry>),
    /// All places are taken: wait until a connection closes.
    Wait,
    Refused,
}

impl Connections {
    pub(super) fn new(limits: Limits) -> Self {
        let (open, changed, refused) = (Mutex::default(), Notify::new(), AtomicU64::new(0));
        Self { limits, open, changed, refused }
    }

    /// Counts a connection from `address`, once there is room for it. Returns `None` if the client has too many
    /// connections, all with running requests: waiting for one of them would keep other clients waiting.
    pub(super) async fn admit(self: &Arc<Self>, address: IpAddr) -> Option<Arc<Entry>> {
        let peer = client(address);
        loop {
            match self.try_admit(peer) {
                Admission::Open(entry) => return Some(entry),
                Admission::Wait => self.changed.notified().await,
                Admission::Refused => {
                    let count = self.refused.fetch_add(1, Ordering::Relaxed) + 1;
                    // Log each doubling only, so that a client cannot fill the log.
                    if count.is_power_of_two() {
                        let limit = self.limits.of(peer);
                        tracing::warn!(
                            count,
                            "closed a new connection from {address}, which has {limit} with running requests \
                             (--max-connections-per-peer)"
                        );
                    }
                    return None;
                }
            }
        }
    }

    fn try_admit(self: &Arc<Self>, peer: IpAddr) -> Admission {
        let mut open = self.open();
        let own = open.by_peer.get(&peer).copied().unwrap_or(0);
        if own >= self.limits.of(peer) && !open.close_oldest(|record| record.peer == peer) {
            return Admission::Refused;
        }
        if open.by_id.len() >= self.limits.total {
            // Close one only if none is closing already, because that one will make room.
            if open.by_id.len() - open.closing >= self.limits.total {
                open.close_oldest(|_| true);
            }
            return Admission::Wait;
        }
        let signal = Arc::new(Signal::default());
        let id = open.number();
        let state = open.idle(id);
        open.by_id.insert(id, Record { peer, state, signal: Arc::clone(&signal) });
        *open.by_peer.entry(peer).or_default() += 1;
        drop(open);
        Admission::Open(Arc::new(Entry { id, signal, connections: Arc::clone(self) }))
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Open {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Puts a connection at the end of the idle order.
    fn idle(&mut self, id: u64) -> State {
        let turn = self.number();
        self.idle.insert(turn, id);
        State::Idle(turn)
    }

    /// Tells the connection that has been idle longest, among those that `may` be closed, to close; returns false if
    /// there is none.
    fn close_oldest(&mut self, may: impl Fn(&Record) -> bool) -> bool {
        let blocked = |record: &Record| record.signal.blocked.load(Ordering::SeqCst);
        let fits = |id: &u64| self.by_id.get(id).is_some_and(|record| may(record) && !blocked(record));
        let Some((turn, id)) = self.idle.iter().find(|(_, id)| fits(id)).map(|(turn, id)| (*turn, *id)) else {
            return false;
        };
        self.idle.remove(&turn);
        let Some(record) = self.by_id.get_mut(&id) else { return false };
        record.state = State::Closing;
        record.signal.closing.store(true, Ordering::SeqCst);
        record.signal.reader.wake();
        self.closing += 1;
        let peer = record.peer;
        self.forget_peer(peer);
        true
    }

    fn forget_peer(&mut self, peer: IpAddr) {
        if let Some(count) = self.by_peer.get_mut(&peer) {
            *count -= 1;
            if *count == 0 {
                self.by_peer.remove(&peer);
            }
        }
    }
}

/// A connection that is counted.
#[derive(Debug)]
pub(super) struct Entry {
    id: u64,
    signal: Arc<Signal>,
    connections: Arc<Connections>,
}

impl Entry {
    /// Keeps the connection open until the returned guard is dropped.
    pub(super) fn run(self: &Arc<Self>) -> Running {
        let mut open = self.connections.open();
        let open = &mut *open;
        if let Some(record) = open.by_id.get_mut(&self.id) {
            match std::mem::replace(&mut record.state, State::Running) {
                State::Idle(turn) => _ = open.idle.remove(&turn),
                // A request arrived before the connection closed, so it stays open and another one must close.
                State::Closing => {
                    record.signal.closing.store(false, Ordering::SeqCst);
                    open.closing -= 1;
                    *open.by_peer.entry(record.peer).or_default() += 1;
                    self.connections.changed.notify_one();
                }
                State::Running => {}
            }
        }
        Running(Arc::clone(self))
    }

    /// Returns whether the connection must end. If not, the task of `cx` is woken when it must.
    pub(super) fn poll_closing(&self, cx: &Context<'_>) -> bool {
        self.signal.reader.register(cx.waker());
        self.signal.closing.load(Ordering::SeqCst) && !self.signal.blocked.load(Ordering::SeqCst)
    }

    /// Records whether the client reads what is written to it.
    pub(super) fn wrote<T>(&self, cx: &Context<'_>, result: &Poll<T>) {
        let blocked = result.is_pending();
        if self.signal.blocked.swap(blocked, Ordering::SeqCst) && !blocked {
            self.connections.changed.notify_one();
            if self.signal.closing.load(Ordering::SeqCst) {
                cx.waker().wake_by_ref();
            }
        }
    }

    /// Stops counting the connection, which is closed.
    pub(super) fn closed(&self) {
        let mut open = self.connections.open();
        if let Some(record) = open.by_id.remove(&self.id) {
            match record.state {
                State::Idle(turn) => _ = open.idle.remove(&turn),
                State::Closing => open.closing -= 1,
                State::Running => {}
            }
            if !matches!(record.state, State::Closing) {
                open.forget_peer(record.peer);
            }
        }
        drop(open);
        self.connections.changed.notify_one();
    }
}

/// A running request. When this is dropped, its connection becomes idle again.
#[derive(Debug)]
pub(super) struct Running(Arc<Entry>);

impl Drop for Running {
    fn drop(&mut self) {
        let mut open = self.0.connections.open();
        if open.by_id.contains_key(&self.0.id) {
            let state = open.idle(self.0.id);
            if let Some(record) = open.by_id.get_mut(&self.0.id) {
                record.state = state;
            }
        }
        drop(open);
        self.0.connections.changed.notify_one();
    }
}

/// Returns the address that identifies a client: an IPv4 address, or a /64 network of IPv6, because one host can use
/// all of its addresses.
fn client(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) if !address.is_loopback() => {
            let prefix = address.to_bits() >> (128 - IPV6_PREFIX) << (128 - IPV6_PREFIX);
            Ipv6Addr::from_bits(prefix).into()
        }
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connections(total: usize, per_peer: Option<usize>) -> Arc<Connections> {
        Arc::new(Connections::new(Limits { total, per_peer }))
    }

    fn is_closing(entry: &Entry) -> bool {
        entry.poll_closing(&Context::from_waker(std::task::Waker::noop()))
    }

    fn admit(connections: &Arc<Connections>, address: &str) -> Admission {
        connections.try_admit(client(address.parse().unwrap()))
    }

    fn waits(connections: &Arc<Connections>) -> bool {
        matches!(admit(connections, "::1"), Admission::Wait)
    }

    fn open(connections: &Arc<Connections>, address: &str) -> Arc<Entry> {
        let Admission::Open(entry) = admit(connections, address) else { panic!("there is no place") };
        entry
    }

    #[test]
    fn the_connection_that_was_idle_for_longest_makes_place() {
        let all = connections(3, None);
        let [one, two, three] = ["::1"; 3].map(|address| open(&all, address));
        drop(one.run());
        assert!(waits(&all), "the place is not free before the connection is closed");
        assert!(waits(&all));
        assert_eq!([&one, &two, &three].map(|entry| is_closing(entry)), [false, true, false], "one for one");
        two.closed();
        let four = open(&all, "::1");
        let _running = three.run();
        assert!(waits(&all));
        assert_eq!([&one, &three, &four].map(|entry| is_closing(entry)), [true, false, false]);
    }

    #[test]
    fn running_requests_and_unread_answers_keep_their_connection() {
        let all = connections(2, None);
        let [one, two] = ["127.0.0.1"; 2].map(|address| open(&all, address));
        let running = one.run();
        let context = Context::from_waker(std::task::Waker::noop());
        two.wrote(&context, &Poll::<()>::Pending);
        assert!(waits(&all));
        assert!(!is_closing(&one) && !is_closing(&two));
        two.wrote(&context, &Poll::Ready(()));
        assert!(waits(&all));
        assert!(!is_closing(&one) && is_closing(&two));
        // A request arrived on it first, so another connection has to close.
        let _second = two.run();
        assert!(!is_closing(&two));
        drop(running);
        assert!(waits(&all));
        assert!(is_closing(&one));
    }

    #[test]
    fn a_client_replaces_its_own_connections_and_is_refused_when_all_are_running() {
        let all = connections(100, Some(2));
        let (other, first, second) = (open(&all, "10.0.0.1"), open(&all, "10.0.0.2"), open(&all, "10.0.0.2"));
        let third = open(&all, "10.0.0.2");
        assert_eq!([&other, &first, &second].map(|entry| is_closing(entry)), [false, true, false]);
        first.closed();
        let running = [second.run(), third.run()];
        assert!(matches!(admit(&all, "10.0.0.2"), Admission::Refused), "waiting would hold up others");
        open(&all, "10.0.0.1");
        drop(running);
        open(&all, "10.0.0.2");
        assert!(is_closing(&second));
    }

    #[test]
    fn an_ipv6_network_is_one_client_and_loopback_none_by_default() {
        let all = connections(8, None);
        let one = open(&all, "2001:db8::1");
        open(&all, "2001:db8::2:1");
        open(&all, "2001:db8:0:1::1");
        assert!(!is_closing(&one));
        open(&all, "2001:db8::3");
        assert!(is_closing(&one));
        let local = ["127.0.0.1", "127.0.0.1", "::ffff:127.0.0.1"].map(|address| open(&all, address));
        assert!(!local.iter().any(|entry| is_closing(entry)));
        assert_eq!((all.limits.of("10.0.0.1".parse().unwrap()), all.open().by_peer.len()), (2, 3));
    }

    #[test]
    fn what_is_closed_is_not_counted() {
        let all = connections(4, Some(4));
        for turn in 0..20 {
            let entries = ["10.0.0.1"; 4].map(|address| open(&all, address));
            let running = entries[turn % 4].run();
            for entry in entries {
                entry.closed();
            }
            drop(running);
        }
        let open = all.open();
        assert!(open.by_id.is_empty() && open.idle.is_empty() && open.by_peer.is_empty() && open.closing == 0);
    }
}
