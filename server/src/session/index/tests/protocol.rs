//! The steps of servers and clients in `interleavings.rs`, and the flaws that a protocol may have.

use std::collections::HashSet;
use std::fmt;

use super::asked::{Answer, Ask, Asked, Set, has};
use super::*;

/// Which requests there are, and what clients do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scenario {
    pub(super) name: &'static str,
    /// The requests that two servers get at the beginning: two different ones, or the same one twice.
    pub(super) requests: [u8; 2],
    /// Whether the requests have idempotency keys. A client that gets no answer then sends its request to the other
    /// server.
    pub(super) keyed: bool,
    /// How many versions the session keeps.
    pub(super) keep: usize,
    /// Whether a client moves the head back to the first version.
    pub(super) rewinds: bool,
}

/// A flaw that a protocol may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flaw {
    /// The holder of the lease commits whatever the head is.
    NoFence,
    CommitBeforeUpload,
    /// The sweep removes what was an orphan when it looked, without claiming it.
    NoClaim,
    /// After an unknown outcome, the turn is run again as another version.
    NewIdAfterUnknown,
    /// A commit stores no receipt.
    NoReceipt,
    /// After an unknown outcome, a refusal of the repeated commit counts as that of the first.
    BelievesRefusal,
    /// A turn whose outcome is unknown removes its object itself.
    RemovesUnknown,
}

/// The state of an attempt at a turn: what it does next, or how it has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum At {
    Receipt,
    Lease,
    Head,
    Upload,
    Commit,
    /// Checks whether its commit has taken effect after all. `refused`: the commit was repeated and refused.
    Find {
        refused: bool,
    },
    /// Removes its object, because its only commit was refused.
    Remove,
    /// Sends the version to the client.
    Send(u8),
    Acknowledged(u8),
    Refused,
    /// The client gets no answer, or one that says that the outcome is unknown.
    Silent,
}

/// Maximum number of attempts: each of two clients sends its request again at most once.
const MOST_ATTEMPTS: usize = 4;

/// An attempt at a turn. It creates the version whose number is one more than its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Attempt {
    pub(super) request: u8,
    pub(super) server: u8,
    pub(super) at: At,
    /// The head from which it starts.
    pub(super) parent: u8,
    /// Whether one of its commits had an unknown outcome.
    pub(super) unknown: bool,
    /// Whether one of its commits is still on its way to the index.
    pub(super) late: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Sweep {
    List,
    Claim(Set),
    RemoveOrphans(Set),
    Collect,
    RemoveGarbage(Set),
    Forget(Set),
    Done,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct State {
    /// The number of the index's view.
    pub(super) index: usize,
    pub(super) objects: Set,
    pub(super) attempts: Vec<Attempt>,
    /// The attempt that holds the session's lease.
    pub(super) holder: Option<usize>,
    pub(super) sweep: Sweep,
    /// How many more crashes, lost or late commits, and rewinds may happen.
    pub(super) crashes: u8,
    pub(super) losses: u8,
    pub(super) rewinds: u8,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Who {
    Attempt(usize),
    Server(u8),
    Lease,
    Client,
    Sweep,
}

/// An event: who does what.
pub(super) type Event = (Who, &'static str);

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Attempt(number) => write!(f, "attempt {number}"),
            Self::Server(number) => write!(f, "server {number}"),
            Self::Lease => f.write_str("the lease"),
            Self::Client => f.write_str("a client"),
            Self::Sweep => f.write_str("the sweep"),
        }
    }
}

impl At {
    fn has_ended(self) -> bool {
        matches!(self, Self::Acknowledged(_) | Self::Refused | Self::Silent)
    }
}

impl State {
    /// Ends an attempt without an answer. Its client may send the request again, to the other server.
    fn fall_silent(&mut self, number: usize, again: bool) {
        self.attempts[number].at = At::Silent;
        let Attempt { request, server, .. } = self.attempts[number];
        let mut others = self.attempts.iter().filter(|other| other.request == request);
        let is_over = others.all(|other| matches!(other.at, At::Silent | At::Refused));
        if again && is_over && self.attempts.len() < MOST_ATTEMPTS {
            self.begin(request, 1 - server, At::Receipt);
        }
    }

    /// Clears the fields of an ended attempt that no longer matter, to reduce the number of distinct states.
    fn settle(&mut self, number: usize) {
        let attempt = &mut self.attempts[number];
        if attempt.at.has_ended() && !attempt.late {
            (attempt.server, attempt.parent, attempt.unknown) = (0, 0, false);
        }
    }

    fn begin(&mut self, request: u8, server: u8, at: At) {
        self.attempts.push(Attempt { request, server, at, parent: 0, unknown: false, late: false });
    }
}

/// The turn protocol on an index.
pub(super) struct Protocol<'i> {
    pub(super) scenario: Scenario,
    pub(super) flaw: Option<Flaw>,
    pub(super) asked: Asked<'i>,
    /// The kinds of events that happened in any order.
    pub(super) reached: HashSet<&'static str>,
}

impl<'i> Protocol<'i> {
    pub(super) async fn new(index: &'i dyn Index, scenario: Scenario, flaw: Option<Flaw>) -> Self {
        let asked = Asked::new(index, scenario.keep).await;
        Self { scenario, flaw, asked, reached: HashSet::new() }
    }

    pub(super) fn start(&self) -> State {
        let (attempts, rewinds) = (Vec::new(), self.scenario.rewinds.into());
        let (holder, sweep) = (None, Sweep::List);
        let mut state = State { index: 0, objects: 1, attempts, holder, sweep, crashes: 1, losses: 1, rewinds };
        for (server, request) in (0..).zip(self.scenario.requests) {
            state.begin(request, server, if self.scenario.keyed { At::Receipt } else { At::Lease });
        }
        state
    }

    /// Returns every event that may happen next.
    pub(super) async fn next(&mut self, state: &State) -> Vec<(Event, State)> {
        let mut next = Vec::new();
        for number in 0..state.attempts.len() {
            self.steps(state, number, &mut next).await;
        }
        let is_waited_for = state.attempts.iter().any(|attempt| attempt.at == At::Lease);
        if state.holder.is_some() && is_waited_for {
            next.push(((Who::Lease, "ends"), State { holder: None, ..state.clone() }));
        }
        for server in 0..2 {
            let mut after = State { crashes: state.crashes.saturating_sub(1), ..state.clone() };
            let running = |(_, attempt): &(usize, &Attempt)| attempt.server == server && !attempt.at.has_ended();
            let running: Vec<usize> = state.attempts.iter().enumerate().filter(running).map(|(n, _)| n).collect();
            for number in &running {
                after.fall_silent(*number, self.scenario.keyed);
                after.settle(*number);
            }
            if state.crashes > 0 && !running.is_empty() {
                next.push(((Who::Server(server), "crashes"), after));
            }
        }
        if state.rewinds > 0 && self.asked.view(state.index).head != 0 {
            let (_, index) = self.asked.ask(state.index, Ask::Rewind).await;
            self.reached.insert("rewound");
            next.push(((Who::Client, "rewinds"), State { index, rewinds: 0, ..state.clone() }));
        }
        if let Some((what, after)) = self.sweep(state).await {
            next.push(((Who::Sweep, what), after));
        }
        next
    }

    /// Adds every step that an attempt may take next.
    #[expect(clippy::too_many_lines, reason = "an arm for each place")]
    async fn steps(&mut self, state: &State, number: usize, next: &mut Vec<(Event, State)>) {
        let (attempt, own) = (state.attempts[number], number as u8 + 1);
        let key = Some(attempt.request).filter(|_| self.scenario.keyed && self.flaw != Some(Flaw::NoReceipt));
        let fenced = self.flaw != Some(Flaw::NoFence);
        let commit = Ask::Commit { version: own, parent: attempt.parent, fenced, key };
        let view = self.asked.view(state.index).clone();
        let mut push = |what, change: &dyn Fn(&mut State, &mut At)| {
            let (mut after, mut at) = (state.clone(), attempt.at);
            change(&mut after, &mut at);
            if at == At::Silent && attempt.at != At::Silent {
                if self.flaw == Some(Flaw::RemovesUnknown) {
                    after.objects &= !(1 << own);
                }
                after.fall_silent(number, self.scenario.keyed || self.flaw == Some(Flaw::NewIdAfterUnknown));
            }
            after.attempts[number].at = at;
            if at.has_ended() && after.holder == Some(number) {
                after.holder = None;
            }
            after.settle(number);
            next.push(((Who::Attempt(number), what), after));
        };
        if attempt.late {
            let (answer, index) = self.asked.ask(state.index, commit).await;
            if answer == Answer::Done {
                self.reached.insert("late");
            }
            push("has its late commit carried out", &|after, _| {
                after.index = index;
                after.attempts[number].late = false;
            });
        }
        match attempt.at {
            At::Receipt => match view.receipts[usize::from(attempt.request)].filter(|_| key.is_some()) {
                Some(version) => {
                    self.reached.insert("answered");
                    push("finds the receipt", &|_, at| *at = At::Send(version));
                }
                None => push("finds no receipt", &|_, at| *at = At::Lease),
            },
            At::Lease if state.holder.is_none() => push("gets the lease", &|after, at| {
                (after.holder, *at) = (Some(number), At::Head);
            }),
            At::Head => push("reads the head", &|after, at| {
                after.attempts[number].parent = view.head;
                *at = if self.flaw == Some(Flaw::CommitBeforeUpload) { At::Commit } else { At::Upload };
            }),
            At::Upload => push("uploads", &|after, at| {
                after.objects |= 1 << own;
                *at = if self.flaw == Some(Flaw::CommitBeforeUpload) { At::Send(own) } else { At::Commit };
            }),
            At::Commit => {
                let (answer, index) = self.asked.ask(state.index, commit).await;
                self.reached.insert(match answer {
                    Answer::Refused if has(view.claimed, own) => "claimed",
                    Answer::Refused => "refused",
                    Answer::Answered => "twice",
                    _ if attempt.unknown => "repeated",
                    _ => "committed",
                });
                push("commits", &|after, at| {
                    after.index = index;
                    *at = match answer {
                        Answer::Answered => At::Receipt,
                        Answer::Refused if attempt.unknown => At::Find { refused: true },
                        Answer::Refused => At::Remove,
                        _ if self.flaw == Some(Flaw::CommitBeforeUpload) => At::Upload,
                        _ => At::Send(own),
                    };
                });
                let outcomes =
                    [("loses the answer to its commit", index, false), ("loses its commit", state.index, false)];
                let late = ("loses a commit that is late", state.index, true);
                for (what, index, late) in outcomes.into_iter().chain([late]).filter(|_| state.losses > 0) {
                    push(what, &|after, at| {
                        (after.index, after.losses, *at) = (index, state.losses - 1, At::Find { refused: false });
                        after.attempts[number] = Attempt { unknown: true, late, ..attempt };
                    });
                }
            }
            At::Find { refused } => {
                if self.flaw == Some(Flaw::NewIdAfterUnknown) {
                    push("starts again", &|_, at| *at = At::Silent);
                } else if view.lists(own) && !(refused && self.flaw == Some(Flaw::BelievesRefusal)) {
                    self.reached.insert("found");
                    push("finds its version", &|_, at| *at = At::Send(own));
                } else if refused && self.flaw == Some(Flaw::BelievesRefusal) {
                    push("believes the refusal", &|_, at| *at = At::Remove);
                } else if !refused {
                    push("repeats its commit", &|_, at| *at = At::Commit);
                }
                push("gives up", &|_, at| *at = At::Silent);
            }
            At::Remove => push("removes its object", &|after, at| {
                after.objects &= !(1 << own);
                *at = At::Refused;
            }),
            At::Send(version) => push("answers", &|_, at| *at = At::Acknowledged(version)),
            At::Lease | At::Acknowledged(_) | At::Refused | At::Silent => {}
        }
    }

    /// Returns the next step of the sweep: first of orphans, then of garbage.
    pub(super) async fn sweep(&mut self, state: &State) -> Option<(&'static str, State)> {
        let (view, mut after) = (self.asked.view(state.index).clone(), state.clone());
        let what;
        (what, after.sweep) = match state.sweep {
            // Objects that the index names by now are never orphans.
            Sweep::List => ("lists the objects", Sweep::Claim(state.objects & !view.kept() & !view.garbage)),
            Sweep::Claim(listed) if self.flaw == Some(Flaw::NoClaim) => {
                ("looks for orphans", Sweep::RemoveOrphans(listed & !view.kept() & !view.garbage))
            }
            Sweep::Claim(listed) => {
                let (answer, index) = self.asked.ask(state.index, Ask::Claim(listed)).await;
                after.index = index;
                let Answer::Claimed(orphans) = answer else { panic!("{answer:?}") };
                ("claims the orphans", if orphans == 0 { Sweep::Collect } else { Sweep::RemoveOrphans(orphans) })
            }
            Sweep::RemoveOrphans(orphans) => {
                after.objects &= !orphans;
                ("removes the orphans", Sweep::Collect)
            }
            Sweep::Collect if view.garbage == 0 => ("finds no garbage", Sweep::Done),
            Sweep::Collect => ("reads the garbage", Sweep::RemoveGarbage(view.garbage)),
            Sweep::RemoveGarbage(garbage) => {
                after.objects &= !garbage;
                ("removes the garbage", Sweep::Forget(garbage))
            }
            Sweep::Forget(garbage) => {
                self.reached.insert("garbage");
                after.index = self.asked.ask(state.index, Ask::Forget(garbage)).await.1;
                ("forgets the garbage", Sweep::Done)
            }
            Sweep::Done => return None,
        };
        Some((what, after))
    }
}
