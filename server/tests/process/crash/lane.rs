//! A lane: a session and its client, with the requests sent, the answers received, and what must exist after a crash.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::script::{Script, Step};
use crate::live::{Reply, Request, get};

/// A client and its session.
pub(crate) struct Lane {
    pub(crate) number: usize,
    script: Script,
    /// The answer to each step, which is the same in every run.
    answers: Vec<Answer>,
    /// The step that was sent but not answered yet.
    open: Option<Step>,
    /// Whether the open step was sent more than once.
    again: bool,
    /// The session's position after all answered steps.
    position: Position,
    /// The session that the lane has abandoned but not deleted yet.
    left: Option<String>,
    /// Number of steps that were sent more than once.
    pub(crate) resent: usize,
    /// Number of steps that a check found committed although they had not been acknowledged.
    pub(crate) found: usize,
}

#[derive(Clone, Default)]
struct Position {
    session: String,
    head: String,
    /// The version that this session was forked from, if any, and those that it made.
    made: Vec<String>,
    /// All versions that the session may list: `made`, and those that a fork inherits.
    known: BTreeSet<String>,
    /// A version that a check found for the open step.
    found: std::cell::RefCell<Option<String>>,
}

/// The part of an answer that does not depend on the server's ids.
#[derive(Debug, PartialEq)]
struct Answer {
    step: Step,
    tokens: Option<u64>,
    ids: Vec<u64>,
    text: String,
}

impl Lane {
    pub(crate) fn new(number: usize) -> Self {
        let (answers, position) = (Vec::new(), Position::default());
        let (open, again, left, resent, found) = (None, false, None, 0, 0);
        Self { number, script: Script::new(number), answers, open, again, position, left, resent, found }
    }

    /// Returns the number of acknowledged steps.
    pub(crate) fn steps(&self) -> usize {
        self.answers.len()
    }

    /// Returns the acknowledged sessions that may exist.
    pub(crate) fn sessions(&self) -> impl Iterator<Item = String> {
        [Some(self.position.session.clone()), self.left.clone()].into_iter().flatten()
    }

    /// Returns the number of sessions that may exist although they were not acknowledged.
    pub(crate) fn may_have_made_sessions(&self) -> usize {
        usize::from(matches!(self.open, Some(Step::Create { .. } | Step::Fork { .. })))
    }

    /// Returns the next request, which repeats the unanswered step or sends a new one.
    pub(crate) fn next(&mut self) -> Request {
        if self.open.is_some() && !self.again {
            self.again = true;
            self.resent += 1;
        }
        let step = self.open.get_or_insert_with(|| self.script.next());
        let path = format!("/v1/sessions/{}", self.position.session);
        let back = |back: &usize| &self.position.made[self.position.made.len() - 1 - back];
        let request = match step {
            Step::Create { seed } => Request::json("POST", "/v1/sessions", &json!({"seed": seed})),
            Step::Append { text } => Request::json("POST", &format!("{path}/append"), &json!({"text": text})),
            Step::Rewind { back: by } => {
                Request::json("POST", &format!("{path}/rewind"), &json!({"version": back(by)}))
            }
            Step::Fork { back: by } => Request::json("POST", &format!("{path}/fork"), &json!({"version": back(by)})),
            Step::Delete => {
                let left = self.left.as_deref().unwrap_or_default();
                Request::json("DELETE", &format!("/v1/sessions/{left}"), &Value::Null)
            }
            Step::Turn { text, tokens, temperature, stop, stream } => {
                let body = json!({
                    "session": self.position.session, "prompt": text, "max_tokens": tokens, "stream": stream,
                    "temperature": temperature, "stop": stop, "ignore_eos": true, "return_token_ids": true,
                });
                Request::json("POST", "/v1/completions", &body)
            }
        };
        request.header("idempotency-key", &format!("lane-{}-{}", self.number, self.answers.len()))
    }

    /// Processes the answer to the last request.
    pub(crate) fn answered(&mut self, reply: &Reply) {
        let step = self.open.take().unwrap();
        // A session deleted before a crash is missing when the deletion is repeated.
        let gone = step == Step::Delete && self.again && reply.status == 404;
        assert!(reply.status < 300 || gone, "lane {}: {step:?}: {} {}", self.number, reply.status, reply.text());
        let (chunks, mut ids, mut text) = (reply.chunks(), Vec::new(), String::new());
        let mut session = &chunks[0];
        for chunk in &chunks {
            let choice = &chunk["choices"][0];
            ids.extend(choice["token_ids"].as_array().into_iter().flatten().filter_map(Value::as_u64));
            text += choice["text"].as_str().unwrap_or_default();
            if chunk["session"].is_object() {
                session = &chunk["session"];
            }
        }
        if let Step::Fork { .. } = step {
            session = &chunks[0]["data"][0];
        }
        let word = |name: &str| session[name].as_str().unwrap_or_default().to_owned();
        match &step {
            Step::Create { .. } => {
                self.position = Position { session: word("id"), ..Position::default() };
                self.position.moved(word("version"));
                // Without text there is no version to go back to.
                self.position.made.clear();
            }
            Step::Turn { .. } | Step::Append { .. } => {
                assert_eq!(word("parent"), self.position.head, "lane {}: {step:?}", self.number);
                if let Some(found) = self.position.found.take() {
                    assert_eq!(found, word("version"), "lane {}: {step:?} has happened twice", self.number);
                    self.found += 1;
                }
                self.position.moved(word("version"));
            }
            Step::Rewind { .. } => self.position.head = word("version"),
            Step::Fork { .. } => {
                let known = std::mem::take(&mut self.position.known);
                self.left = Some(std::mem::replace(&mut self.position.session, word("id")));
                self.position.made.clear();
                self.position.known = known;
                self.position.moved(word("version"));
            }
            Step::Delete => self.left = None,
        }
        let tokens = session["tokens"].as_u64();
        self.answers.push(Answer { step: step.clone(), tokens: tokens.filter(|_| step != Step::Delete), ids, text });
        self.again = false;
    }

    /// Checks, after a crash, that everything acknowledged exists, and beyond it at most the result of the open step.
    pub(crate) fn check(&self, address: &str) {
        let Self { number, open, position, .. } = self;
        if position.session.is_empty() {
            return;
        }
        let path = format!("/v1/sessions/{}", position.session);
        let now = get(address, &path).unwrap();
        assert_eq!(now.status, 200, "lane {number}: its session is gone: {}", now.text());
        let head = now.json()["version"].as_str().unwrap().to_owned();
        let turns = get(address, &format!("{path}/turns")).unwrap().json();
        let turns = turns["data"].as_array().unwrap();
        let names: BTreeSet<String> = turns.iter().map(|turn| turn["version"].as_str().unwrap().to_owned()).collect();
        for made in &position.made {
            assert!(names.contains(made), "lane {number}: {made} was acknowledged and is lost");
        }
        let unacknowledged: Vec<&String> = names.difference(&position.known).collect();
        let makes = matches!(open, Some(Step::Turn { .. } | Step::Append { .. }));
        assert!(
            unacknowledged.len() <= usize::from(makes),
            "lane {number}: {open:?} was open, {unacknowledged:?} are there"
        );
        let mut allowed = BTreeSet::from([&position.head]);
        if let Some(unacknowledged) = unacknowledged.first() {
            // Versions and head change in one transaction.
            allowed = BTreeSet::from([*unacknowledged]);
            *position.found.borrow_mut() = Some((*unacknowledged).clone());
        }
        if let Some(Step::Rewind { back }) = open {
            allowed.insert(&position.made[position.made.len() - 1 - back]);
        }
        assert!(allowed.contains(&head), "lane {number}: the head is {head}, not one of {allowed:?}");
        if let Some(left) = self.left.as_ref().filter(|_| *open != Some(Step::Delete)) {
            assert_eq!(get(address, &format!("/v1/sessions/{left}")).unwrap().status, 200, "lane {number}: {left}");
        }
    }

    /// Returns the state and the text of the head, without ids and times.
    pub(crate) fn head(&self, address: &str) -> Vec<u8> {
        let reply = get(address, &format!("/v1/sessions/{}/snapshot", self.position.session)).unwrap();
        assert_eq!(reply.status, 200, "{}", reply.text());
        let number = |at: usize, bytes: usize| {
            reply.body[at..at + bytes].iter().rev().fold(0, |sum, byte| sum << 8 | usize::from(*byte))
        };
        let [header, body, description, text] =
            [(12, 4), (16, 8), (24, 8), (32, 8)].map(|(at, bytes)| number(at, bytes));
        assert!(text > 0, "its text is in the file");
        let state = 40 + header + body;
        [&reply.body[40..state], &reply.body[state + description..state + description + text]].concat()
    }

    /// Fails if the two lanes received different answers.
    pub(crate) fn assert_same(&self, other: &Self) {
        for (at, (one, two)) in self.answers.iter().zip(&other.answers).enumerate() {
            assert_eq!(one, two, "lane {}, step {at}", self.number);
        }
        assert_eq!(self.answers.len(), other.answers.len());
    }
}

impl Position {
    fn moved(&mut self, version: String) {
        self.known.insert(version.clone());
        self.made.push(version.clone());
        self.head = version;
    }
}
