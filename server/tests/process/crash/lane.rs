//! A session and who uses it: what was asked for, what was answered, and what must be there after a crash.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::script::{Script, Step};
use crate::live::{Reply, Request, get};

/// One client.
pub(crate) struct Lane {
    pub(crate) number: usize,
    script: Script,
    /// What the client has been told of each step: the same in every run.
    told: Vec<Told>,
    /// The step that was sent and not answered yet.
    open: Option<Step>,
    /// Whether it was sent before.
    again: bool,
    /// Where the session is after all that was answered.
    place: Place,
    /// The session that the lane has left and not deleted yet.
    left: Option<String>,
    /// Steps that were sent more than once.
    pub(crate) resent: usize,
    /// Steps of which a check found that they had been committed although nobody was told.
    pub(crate) found: usize,
}

#[derive(Clone, Default)]
struct Place {
    session: String,
    head: String,
    /// The versions that this session has made, and the one that it began with.
    made: Vec<String>,
    /// All that it may know: those, and those that a fork was given.
    known: BTreeSet<String>,
    /// A version that a check found, of the step that is open.
    found: std::cell::RefCell<Option<String>>,
}

/// What does not depend on the server's ids.
#[derive(Debug, PartialEq)]
struct Told {
    step: Step,
    tokens: Option<u64>,
    ids: Vec<u64>,
    text: String,
}

impl Lane {
    pub(crate) fn new(number: usize) -> Self {
        let (told, place) = (Vec::new(), Place::default());
        let (open, again, left, resent, found) = (None, false, None, 0, 0);
        Self { number, script: Script::new(number), told, open, again, place, left, resent, found }
    }

    /// Steps that were acknowledged.
    pub(crate) fn steps(&self) -> usize {
        self.told.len()
    }

    /// The sessions that may be there.
    pub(crate) fn sessions(&self) -> impl Iterator<Item = String> {
        [Some(self.place.session.clone()), self.left.clone()].into_iter().flatten()
    }

    /// Sessions that may be there although nobody was told.
    pub(crate) fn may_have_made_sessions(&self) -> usize {
        usize::from(matches!(self.open, Some(Step::Create { .. } | Step::Fork { .. })))
    }

    /// What to send: the step that was not answered, or the next.
    pub(crate) fn next(&mut self) -> Request {
        if self.open.is_some() && !self.again {
            self.again = true;
            self.resent += 1;
        }
        let step = self.open.get_or_insert_with(|| self.script.next());
        let path = format!("/v1/sessions/{}", self.place.session);
        let back = |back: &usize| &self.place.made[self.place.made.len() - 1 - back];
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
                    "session": self.place.session, "prompt": text, "max_tokens": tokens, "stream": stream,
                    "temperature": temperature, "stop": stop, "ignore_eos": true, "return_token_ids": true,
                });
                Request::json("POST", "/v1/completions", &body)
            }
        };
        request.header("idempotency-key", &format!("lane-{}-{}", self.number, self.told.len()))
    }

    /// The answer to what was sent last.
    pub(crate) fn answered(&mut self, reply: &Reply) {
        let step = self.open.take().unwrap();
        // What was deleted before a crash is not there when it is deleted again.
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
                self.place = Place { session: word("id"), ..Place::default() };
                self.place.moved(word("version"));
                // Without text there is nothing to go back to.
                self.place.made.clear();
            }
            Step::Turn { .. } | Step::Append { .. } => {
                assert_eq!(word("parent"), self.place.head, "lane {}: {step:?}", self.number);
                if let Some(found) = self.place.found.take() {
                    assert_eq!(found, word("version"), "lane {}: {step:?} has happened twice", self.number);
                    self.found += 1;
                }
                self.place.moved(word("version"));
            }
            Step::Rewind { .. } => self.place.head = word("version"),
            Step::Fork { .. } => {
                let known = std::mem::take(&mut self.place.known);
                self.left = Some(std::mem::replace(&mut self.place.session, word("id")));
                self.place.made.clear();
                self.place.known = known;
                self.place.moved(word("version"));
            }
            Step::Delete => self.left = None,
        }
        let tokens = session["tokens"].as_u64();
        self.told.push(Told { step: step.clone(), tokens: tokens.filter(|_| step != Step::Delete), ids, text });
        self.again = false;
    }

    /// After a crash: what was acknowledged is there, and beyond it at most what was being done.
    pub(crate) fn check(&self, address: &str) {
        let Self { number, open, place, .. } = self;
        if place.session.is_empty() {
            return;
        }
        let path = format!("/v1/sessions/{}", place.session);
        let now = get(address, &path).unwrap();
        assert_eq!(now.status, 200, "lane {number}: its session is gone: {}", now.text());
        let head = now.json()["version"].as_str().unwrap().to_owned();
        let turns = get(address, &format!("{path}/turns")).unwrap().json();
        let turns = turns["data"].as_array().unwrap();
        let names: BTreeSet<String> = turns.iter().map(|turn| turn["version"].as_str().unwrap().to_owned()).collect();
        for made in &place.made {
            assert!(names.contains(made), "lane {number}: {made} was acknowledged and is lost");
        }
        let strange: Vec<&String> = names.difference(&place.known).collect();
        let makes = matches!(open, Some(Step::Turn { .. } | Step::Append { .. }));
        assert!(strange.len() <= usize::from(makes), "lane {number}: {open:?} was open, {strange:?} are there");
        let mut allowed = BTreeSet::from([&place.head]);
        if let Some(strange) = strange.first() {
            // Its versions and its head are one transaction.
            allowed = BTreeSet::from([*strange]);
            *place.found.borrow_mut() = Some((*strange).clone());
        }
        if let Some(Step::Rewind { back }) = open {
            allowed.insert(&place.made[place.made.len() - 1 - back]);
        }
        assert!(allowed.contains(&head), "lane {number}: the head is {head}, not one of {allowed:?}");
        if let Some(left) = self.left.as_ref().filter(|_| *open != Some(Step::Delete)) {
            assert_eq!(get(address, &format!("/v1/sessions/{left}")).unwrap().status, 200, "lane {number}: {left}");
        }
    }

    /// The bytes of the head.
    pub(crate) fn head(&self, address: &str) -> Vec<u8> {
        let reply = get(address, &format!("/v1/sessions/{}/snapshot", self.place.session)).unwrap();
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.body
    }

    /// Fails where the two have been told different things.
    pub(crate) fn assert_same(&self, other: &Self) {
        for (at, (one, two)) in self.told.iter().zip(&other.told).enumerate() {
            assert_eq!(one, two, "lane {}, step {at}", self.number);
        }
        assert_eq!(self.told.len(), other.told.len());
    }
}

impl Place {
    fn moved(&mut self, version: String) {
        self.known.insert(version.clone());
        self.made.push(version.clone());
        self.head = version;
    }
}
