//! A semaphore that is fair between owners: free permits go to the waiting owners in turn, and no owner may hold or wait
//! for more than its share.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, PoisonError};

use tokio::sync::oneshot::{self, Receiver, Sender};

use crate::session::Owner;
use crate::sync::{Mutex, MutexGuard, receive};

/// The limits of a gate.
#[derive(Clone, Copy, Debug)]
pub(super) struct GateLimits {
    /// Permits in total.
    pub(super) permits: usize,
    /// Most permits that one owner may hold.
    pub(super) held: usize,
    /// Most requests of one owner that may wait.
    pub(super) waiting: usize,
}

/// The owner already has as many waiting requests as it may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Full {
    /// The number of waiting requests.
    pub(super) waiting: usize,
}

/// The semaphore. Cheap to clone.
#[derive(Clone)]
pub(super) struct FairGate(Arc<Gate>);

struct Gate {
    limits: GateLimits,
    state: Mutex<State>,
}

struct State {
    free: usize,
    /// The owners that hold a permit or wait for one.
    owners: HashMap<Owner, OwnerState>,
    /// The owners that wait, in the order of their turns.
    turns: VecDeque<Owner>,
}

#[derive(Default)]
struct OwnerState {
    held: usize,
    waiting: VecDeque<Sender<Permit>>,
}

/// A permit of one owner. Dropping it returns it.
pub(super) struct Permit {
    gate: Arc<Gate>,
    owner: Owner,
    /// False while [`Self::pass`] waits, because the permit has then been returned.
    held: bool,
}

impl FairGate {
    pub(super) fn new(limits: GateLimits) -> Self {
        let state = State { free: limits.permits, owners: HashMap::new(), turns: VecDeque::new() };
        Self(Arc::new(Gate { limits, state: Mutex::new(state) }))
    }

    /// Waits for a permit.
    ///
    /// # Errors
    /// The owner has too many waiting requests already.
    pub(super) async fn acquire(&self, owner: Owner) -> Result<Permit, Full> {
        let most = self.0.limits.waiting;
        let waiting = {
            let mut state = self.0.lock();
            let queue = &mut state.owners.entry(owner).or_default().waiting;
            if queue.len() >= most {
                // The futures of some waiting requests may have been dropped.
                queue.retain(|sender| !sender.is_closed());
                if queue.len() >= most {
                    return Err(Full { waiting: most });
                }
            }
            state.enqueue(owner, VecDeque::push_back)
        };
        self.0.grant();
        // A sender is dropped without sending only after its receiver, so this cannot fail here.
        waiting.await.map_err(|_| Full { waiting: most })
    }
}

impl Permit {
    /// Lets other waiting owners take a turn first. Blocks until this owner's next turn, in which this request comes
    /// first, so that an owner has few unfinished requests.
    pub(super) fn pass(&mut self) {
        let waiting = {
            let mut state = self.gate.lock();
            let most = self.gate.limits.held;
            if !state.turns.iter().any(|owner| *owner != self.owner && state.may_hold(owner, most)) {
                return;
            }
            let waiting = state.enqueue(self.owner, VecDeque::push_front);
            // This owner may be queued ahead of others for its other requests: move it to the back.
            state.turns.retain(|owner| *owner != self.owner);
            state.turns.push_back(self.owner);
            waiting
        };
        self.release();
        if let Ok(permit) = receive(waiting) {
            *self = permit;
        }
    }

    fn release(&mut self) {
        if std::mem::take(&mut self.held) {
            self.gate.lock().release(self.owner);
            self.gate.grant();
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.release();
    }
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No holder of the lock panics or awaits.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the free permits to the owners whose turns are next.
    fn grant(self: &Arc<Self>) {
        loop {
            let next = self.lock().next(self.limits.held);
            let Some((owner, sender)) = next else { return };
            // If the receiver is gone, `send` returns the permit, and dropping it returns it to the gate.
            let _ = sender.send(Permit { gate: Arc::clone(self), owner, held: true });
        }
    }
}

impl State {
    fn may_hold(&self, owner: &Owner, most: usize) -> bool {
        self.owners.get(owner).is_some_and(|owner| owner.held < most)
    }

    fn enqueue(&mut self, owner: Owner, push: fn(&mut VecDeque<Sender<Permit>>, Sender<Permit>)) -> Receiver<Permit> {
        let (sender, receiver) = oneshot::channel();
        // One turn for each owner, even if all its waiting requests have been given up.
        if !self.turns.contains(&owner) {
            self.turns.push_back(owner);
        }
        let queue = &mut self.owners.entry(owner).or_default().waiting;
        push(queue, sender);
        receiver
    }

    /// Takes a free permit for the owner that is next.
    fn next(&mut self, most: usize) -> Option<(Owner, Sender<Permit>)> {
        while self.free > 0 {
            let at = self.turns.iter().position(|owner| self.may_hold(owner, most))?;
            let owner = self.turns.remove(at)?;
            let state = self.owners.get_mut(&owner)?;
            // Requests that were given up do not use up their owner's turn.
            let sender = std::iter::from_fn(|| state.waiting.pop_front()).find(|sender| !sender.is_closed());
            if !state.waiting.is_empty() {
                self.turns.push_back(owner);
            }
            if let Some(sender) = sender {
                state.held += 1;
                self.free -= 1;
                return Some((owner, sender));
            }
            self.forget(owner);
        }
        None
    }

    fn release(&mut self, owner: Owner) {
        self.free += 1;
        if let Some(state) = self.owners.get_mut(&owner) {
            state.held -= 1;
        }
        self.forget(owner);
    }

    /// Forgets an owner that neither holds a permit nor waits for one.
    fn forget(&mut self, owner: Owner) {
        if self.owners.get(&owner).is_some_and(|state| state.held == 0 && state.waiting.is_empty()) {
            self.owners.remove(&owner);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    // Not `crate::sync::Mutex`: what a test records is not part of the model.
    use std::sync::Mutex as Record;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::{Context, Poll, Waker};

    use super::*;
    use crate::sync::{block_on, check, thread};

    const A: Owner = Owner([1; 16]);
    const B: Owner = Owner([2; 16]);
    const C: Owner = Owner([3; 16]);

    fn gate(permits: usize, held: usize, waiting: usize) -> FairGate {
        FairGate::new(GateLimits { permits, held, waiting })
    }

    fn poll<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
        match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        }
    }

    /// Acquires a permit that is free now.
    fn now(gate: &FairGate, owner: Owner) -> Option<Permit> {
        poll(&mut Box::pin(gate.acquire(owner))).and_then(Result::ok)
    }

    fn is_forgotten(gate: &FairGate) -> bool {
        let state = gate.0.lock();
        state.owners.is_empty() && state.turns.is_empty() && state.free == gate.0.limits.permits
    }

    #[test]
    fn owners_take_turns_whatever_each_of_them_asks_for() {
        check(|| {
            let gate = gate(1, 1, 100);
            let first = now(&gate, A).unwrap();
            let mut waiting: Vec<_> = [A, A, A, B, B, C].map(|owner| (owner, Box::pin(gate.acquire(owner)))).into();
            assert!(waiting.iter_mut().all(|(_, future)| poll(future).is_none()));
            let (mut order, mut held) = (Vec::new(), Some(first));
            while let Some(permit) = held.take() {
                drop(permit);
                for at in 0..waiting.len() {
                    if let Some(permit) = poll(&mut waiting[at].1) {
                        order.push(waiting.remove(at).0);
                        held = permit.ok();
                        break;
                    }
                }
            }
            assert_eq!(order, [A, B, C, A, B, A]);
            assert!(is_forgotten(&gate));
        });
    }

    #[test]
    fn an_owner_never_holds_all_permits_and_waits_for_its_own_only() {
        check(|| {
            let gate = gate(2, 1, 100);
            let held = now(&gate, A).unwrap();
            let mut more = Box::pin(gate.acquire(A));
            assert!(poll(&mut more).is_none());
            let other = now(&gate, B).expect("the second permit is not for A");
            drop(other);
            assert!(poll(&mut more).is_none());
            drop(held);
            assert!(poll(&mut more).is_some_and(|permit| permit.is_ok()));
            assert!(is_forgotten(&gate));
        });
    }

    #[test]
    fn the_queue_of_an_owner_is_bounded_and_that_of_others_is_not_affected() {
        check(|| {
            let gate = gate(1, 1, 2);
            let held = now(&gate, A).unwrap();
            let mut waiting: Vec<_> = (0..2).map(|_| Box::pin(gate.acquire(A))).collect();
            assert!(waiting.iter_mut().all(|future| poll(future).is_none()));
            assert_eq!(poll(&mut Box::pin(gate.acquire(A))).and_then(Result::err), Some(Full { waiting: 2 }));
            let mut other = Box::pin(gate.acquire(B));
            assert!(poll(&mut other).is_none());
            // A request that was given up frees its place.
            waiting.pop();
            assert!(poll(&mut Box::pin(gate.acquire(A))).is_none());
            drop(waiting);
            drop(held);
            assert!(poll(&mut other).is_some());
            assert!(is_forgotten(&gate));
        });
    }

    #[test]
    fn an_owner_that_gives_up_all_its_requests_gets_no_further_turns() {
        check(|| {
            let gate = gate(1, 1, 2);
            let held = now(&gate, B).unwrap();
            for _ in 0..10 {
                let mut waiting: Vec<_> = (0..2).map(|_| Box::pin(gate.acquire(A))).collect();
                assert!(waiting.iter_mut().all(|future| poll(future).is_none()));
            }
            assert_eq!(gate.0.lock().turns.len(), 1);
            drop(held);
            assert!(now(&gate, C).is_some());
            assert!(is_forgotten(&gate));
        });
    }

    #[test]
    fn a_permit_that_nobody_takes_goes_to_the_next() {
        check(|| {
            let gate = gate(1, 1, 100);
            let held = now(&gate, A).unwrap();
            let (mut gone, mut next) = (Box::pin(gate.acquire(B)), Box::pin(gate.acquire(C)));
            assert!(poll(&mut gone).is_none() && poll(&mut next).is_none());
            drop(held);
            // The permit has been sent, but not received.
            drop(gone);
            assert!(poll(&mut next).is_some());
            assert!(is_forgotten(&gate));
        });
    }

    #[test]
    fn a_permit_is_passed_to_other_owners_and_not_to_the_same_one() {
        check(|| {
            let gate = gate(1, 1, 100);
            let mut held = now(&gate, A).unwrap();
            let mut same = Box::pin(gate.acquire(A));
            assert!(poll(&mut same).is_none());
            held.pass();
            assert!(poll(&mut same).is_none(), "the request that has begun goes on");
            let mut others = [B, C].map(|owner| Box::pin(gate.acquire(owner)));
            assert!(others.iter_mut().all(|other| poll(other).is_none()));
            let passed = Arc::new(AtomicBool::new(false));
            let passing = thread::spawn({
                let passed = Arc::clone(&passed);
                move || {
                    held.pass();
                    passed.store(true, Ordering::SeqCst);
                    held
                }
            });
            for mut other in others {
                let permit = loop {
                    if let Some(permit) = poll(&mut other) {
                        break permit;
                    }
                    thread::yield_now();
                };
                assert!(poll(&mut same).is_none() && !passed.load(Ordering::SeqCst));
                drop(permit);
            }
            drop(passing.join().unwrap());
            assert!(poll(&mut same).is_some());
            assert!(is_forgotten(&gate));
        });
    }

    #[test]
    fn everyone_who_waits_gets_a_permit_and_no_more_are_held_than_there_are() {
        check(|| {
            let gate = gate(2, 1, 10);
            let held = Arc::new(Record::new(HashMap::<Owner, usize>::new()));
            let work = |held: &Record<HashMap<Owner, usize>>, owner| {
                let count = |by: isize| {
                    let mut held = held.lock().unwrap();
                    let of = held.entry(owner).or_default();
                    *of = of.saturating_add_signed(by);
                    assert!(*of <= 1 && held.values().sum::<usize>() <= 2, "{held:?}");
                };
                count(1);
                thread::yield_now();
                count(-1);
            };
            let threads = [A, A, B, C].map(|owner| {
                let (gate, held) = (gate.clone(), Arc::clone(&held));
                thread::spawn(move || {
                    // Asks for a permit, and gives up.
                    drop(now(&gate, C));
                    let mut permit = block_on(gate.acquire(owner)).ok().unwrap();
                    work(&held, owner);
                    permit.pass();
                    work(&held, owner);
                })
            });
            for thread in threads {
                thread.join().unwrap();
            }
            assert!(is_forgotten(&gate));
        });
    }
}
