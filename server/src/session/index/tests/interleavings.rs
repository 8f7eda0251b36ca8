//! Model checking of the turn protocol: two requests on two servers, in every order of their steps. Each server may
//! crash at any point, or sleep there as long as others have anything to do; a connection to the index breaks during a
//! commit; a client retries; and a sweep runs. The index is a real one (`asked.rs`).
//!
//! A sleeping server is one whose next step comes late, so the set of all orders covers every way to sleep. A lease may
//! end at any time, even while its server runs, and the sweep waits for nothing. Steps that nobody else can observe are
//! left out.
//!
//! In every state, the versions form a chain without duplicates, the head is the last of them, every object that a
//! version needs exists, every acknowledged version is in the chain, every refused one is not, and no request has two
//! versions in it. At the end, a second sweep leaves no other object.

use futures_util::future::BoxFuture;

use super::asked::has;
use super::protocol::{At, Event, Flaw, Protocol, Scenario, State, Sweep};
use super::*;

const TWO: Scenario = Scenario { name: "two requests", requests: [0, 1], keyed: false, keep: 9, rewinds: false };
const KEYED: Scenario = Scenario { name: "two requests with keys", keyed: true, ..TWO };
const SCENARIOS: [Scenario; 6] = [
    TWO,
    KEYED,
    Scenario { name: "one request on two servers", requests: [0, 0], ..KEYED },
    Scenario { name: "two requests, and one version is kept", keep: 1, ..TWO },
    Scenario { name: "two requests and a rewind", rewinds: true, ..TWO },
    Scenario { name: "one request on two servers, and a rewind", requests: [0, 0], rewinds: true, ..KEYED },
];

const FLAWS: [(Flaw, Scenario); 7] = [
    (Flaw::NoFence, TWO),
    (Flaw::CommitBeforeUpload, TWO),
    (Flaw::NoClaim, TWO),
    (Flaw::NewIdAfterUnknown, TWO),
    (Flaw::NoReceipt, KEYED),
    (Flaw::BelievesRefusal, TWO),
    (Flaw::RemovesUnknown, TWO),
];

struct Explorer<'i> {
    protocol: Protocol<'i>,
    /// For each state, the number of orders in which the rest can happen.
    seen: HashMap<State, u128>,
    /// The events so far in the order that is being explored.
    trace: Vec<Event>,
}

/// Runs two turns on two servers in every order, and checks that a problem is found in each flawed protocol. If `all`
/// is false, skips the orders that need the most questions to the index.
pub(crate) async fn interleaves(all: bool, index: Arc<dyn Index>) {
    let mut reached = HashSet::new();
    for scenario in SCENARIOS.into_iter().filter(|scenario| all || scenario.name != KEYED.name) {
        let mut explorer = Explorer::new(&*index, scenario, None).await;
        let state = explorer.protocol.start();
        let orders = explorer.explore(state).await.unwrap_or_else(|problem| panic!("{}: {problem}", scenario.name));
        let (states, questions) = (explorer.seen.len(), explorer.protocol.asked.questions());
        println!("{}: {orders} orders of {states} states, {questions} questions to the index", scenario.name);
        reached.extend(explorer.protocol.reached);
    }
    for (flaw, scenario) in FLAWS {
        let mut explorer = Explorer::new(&*index, scenario, Some(flaw)).await;
        let state = explorer.protocol.start();
        println!("{flaw:?}: {}", explorer.explore(state).await.expect_err("the flaw is found"));
    }
    let all = ["answered", "claimed", "found", "garbage", "late", "refused", "repeated", "rewound", "twice"];
    assert!(all.iter().all(|name| reached.contains(name)), "{reached:?}");
    index.close().await.expect("the index closes");
}

impl<'i> Explorer<'i> {
    async fn new(index: &'i dyn Index, scenario: Scenario, flaw: Option<Flaw>) -> Self {
        let protocol = Protocol::new(index, scenario, flaw).await;
        Self { protocol, seen: HashMap::new(), trace: Vec::new() }
    }

    /// Takes every possible step, and returns in how many orders the rest can happen.
    fn explore(&mut self, state: State) -> BoxFuture<'_, Result<u128, String>> {
        Box::pin(async move {
            if let Some(orders) = self.seen.get(&state) {
                return Ok(*orders);
            }
            let next = self.protocol.next(&state).await;
            let mut problem = self.problem(&state);
            if problem.is_none() && next.is_empty() {
                problem = self.leftover(state.clone()).await;
            }
            if let Some(problem) = problem {
                let trace: Vec<String> = self.trace.iter().map(|(who, what)| format!("{who} {what}")).collect();
                return Err(format!("{problem}, after: {}", trace.join(", ")));
            }
            let mut orders = u128::from(next.is_empty());
            for (event, next) in next {
                self.trace.push(event);
                orders += self.explore(next).await?;
                self.trace.pop();
            }
            self.seen.insert(state, orders);
            Ok(orders)
        })
    }

    /// Returns the violation of an invariant in this state, if there is one.
    fn problem(&self, state: &State) -> Option<String> {
        let view = self.protocol.asked.view(state.index);
        for (at, entry) in view.list.iter().enumerate() {
            let earlier = &view.list[..at];
            let follows = match earlier.last() {
                None => entry.parent.is_none(),
                Some(_) if self.protocol.scenario.rewinds => {
                    earlier.iter().any(|earlier| entry.parent == Some(earlier.version))
                }
                Some(last) => entry.parent == Some(last.version),
            };
            if !follows || earlier.iter().any(|earlier| earlier.version == entry.version) {
                return Some(format!("the versions are no chain: {:?}", view.list));
            }
        }
        let is_last = view.list.last().is_some_and(|entry| entry.version == view.head);
        if !has(view.kept(), view.head) || !(is_last || self.protocol.scenario.rewinds) {
            return Some(format!("the head is {} of {:?}", view.head, view.list));
        }
        if view.kept() & !state.objects != 0 {
            return Some(format!("of the objects of {:?}, there are {:b}", view.list, state.objects));
        }
        let request = |version: u8| state.attempts.get(usize::from(version).checked_sub(1)?).map(|made| made.request);
        for (own, attempt) in (1..).zip(&state.attempts) {
            let others = view.list.iter().filter(|entry| request(entry.version) == Some(attempt.request));
            let is_wrong = match attempt.at {
                At::Acknowledged(version) => !view.lists(version) || request(version) != Some(attempt.request),
                At::Refused => view.lists(own),
                _ => false,
            };
            if is_wrong || others.count() > 1 {
                return Some(format!("{attempt:?}, but the versions are {:?}", view.list));
            }
        }
        None
    }

    /// Returns the problem that is left when everything has ended and another sweep has removed what nothing needs.
    async fn leftover(&mut self, mut state: State) -> Option<String> {
        state.sweep = Sweep::List;
        while let Some((_, after)) = self.protocol.sweep(&state).await {
            state = after;
        }
        let kept = self.protocol.asked.view(state.index).kept();
        (kept != state.objects).then(|| format!("the versions {kept:b} are kept, and there are {:b}", state.objects))
    }
}
