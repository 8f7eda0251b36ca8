//! `POST /v1/chat/completions`: messages in, one message out.

use serde::Serialize;
use serde_json::Value;

use super::answer::{Head, Usage, UsageField, Wanted, finish_reason};
use super::dialect::{Dialect, Kept, Said};
use crate::engine::{Delta, Finish};

/// What is said, or a piece of it.
#[derive(Clone, Debug, Default, Serialize)]
struct Message {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    /// Null in a whole message: the model refuses nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    refusal: Option<Value>,
}

#[derive(Debug, Default, Serialize)]
struct Choice {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<Message>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<Message>,
    /// Always null: log probabilities are refused.
    logprobs: Option<()>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

/// The format of `/v1/chat/completions`.
pub(super) struct Chat {
    head: Head,
    wanted: Wanted,
    text: String,
    token_ids: Vec<u32>,
    reason: Option<&'static str>,
    kept: Kept,
    usage: UsageField,
}

impl Chat {
    pub(super) fn new(head: Head, wanted: Wanted) -> Self {
        let (kept, usage) = (Kept::default(), UsageField::Absent);
        Self { head, wanted, text: String::new(), token_ids: Vec::new(), reason: None, kept, usage }
    }

    fn chunk(&self, delta: Message, choice: Choice, kept: &Kept) -> Said {
        let usage = if self.wanted.include_usage { UsageField::Later } else { UsageField::Absent };
        let choice = Choice { delta: Some(delta), ..choice };
        Said::data(self.head.json("chat.completion.chunk", &[choice], usage, kept))
    }
}

impl Dialect for Chat {
    fn open(&mut self, out: &mut Vec<Said>) {
        let delta = Message { role: Some("assistant"), content: Some(String::new()), ..Message::default() };
        out.push(self.chunk(delta, Choice::default(), &Kept::default()));
    }

    fn delta(&mut self, _: usize, delta: Delta, out: &mut Vec<Said>) {
        if self.wanted.whole {
            self.text.push_str(&delta.text);
            self.token_ids.extend(delta.token_ids.iter().filter(|_| self.wanted.token_ids));
        }
        // Without ids there is nothing to say until there is text.
        if !delta.text.is_empty() || self.wanted.token_ids {
            let token_ids = self.wanted.token_ids.then_some(delta.token_ids);
            let message = Message { content: Some(delta.text), ..Message::default() };
            out.push(self.chunk(message, Choice { token_ids, ..Choice::default() }, &Kept::default()));
        }
    }

    fn end(&mut self, _: usize, finish: &Finish, kept: &Kept, out: &mut Vec<Said>) {
        self.reason = Some(finish_reason(finish.reason));
        self.kept = kept.clone();
        out.push(self.chunk(Message::default(), Choice { finish_reason: self.reason, ..Choice::default() }, kept));
    }

    fn close(&mut self, usage: Usage, out: &mut Vec<Said>) {
        self.usage = UsageField::Known(usage);
        if self.wanted.include_usage {
            // The state is large, and has been sent.
            let kept = Kept { state: None, ..self.kept.clone() };
            out.push(Said::data(self.head.json::<Choice>("chat.completion.chunk", &[], self.usage, &kept)));
        }
        out.push(Said::data("[DONE]"));
    }

    fn body(&self) -> String {
        let message = Message { role: Some("assistant"), content: Some(self.text.clone()), refusal: Some(Value::Null) };
        let token_ids = self.wanted.token_ids.then(|| self.token_ids.clone());
        let choice = Choice { message: Some(message), finish_reason: self.reason, token_ids, ..Choice::default() };
        self.head.json("chat.completion", &[choice], self.usage, &self.kept)
    }
}
