//! Completions as they go out: one object, or the chunks of a stream.

use std::time::{SystemTime, UNIX_EPOCH};

use rand::Rng;
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::dialect::{Dialect, Kept, Said, SessionInfo};
use super::state::Served;
use crate::engine::{Delta, Finish, FinishReason, Timings};

/// Tokens that a request took.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(super) struct Usage {
    pub(super) prompt_tokens: usize,
    pub(super) completion_tokens: usize,
    pub(super) total_tokens: usize,
    pub(super) prompt_tokens_details: PromptDetails,
}

/// How much of the prompts needed no computing.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(super) struct PromptDetails {
    pub(super) cached_tokens: usize,
}

impl Usage {
    /// What a request has taken that has generated nothing yet.
    pub(super) fn of_prompts(tokens: usize, cached_tokens: usize) -> Self {
        let prompt_tokens_details = PromptDetails { cached_tokens };
        Self { prompt_tokens: tokens, completion_tokens: 0, total_tokens: tokens, prompt_tokens_details }
    }

    pub(super) fn add_completion(&mut self, tokens: usize) {
        self.completion_tokens += tokens;
        self.total_tokens += tokens;
    }
}

/// The field `usage` of an object.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(untagged)]
pub(super) enum UsageField {
    /// Not there: nobody asked.
    Absent,
    /// Null: it comes at the stream's end.
    Later,
    /// There.
    Known(Usage),
}

impl UsageField {
    fn is_absent(&self) -> bool {
        matches!(self, Self::Absent)
    }
}

/// Where the time went, in milliseconds: an addition to OpenAI's format.
#[expect(clippy::struct_field_names, reason = "the names say the unit")]
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[schema(as = Timings)]
pub(super) struct TimingsMs {
    queue_ms: f64,
    prefill_ms: f64,
    decode_ms: f64,
}

impl From<Timings> for TimingsMs {
    fn from(timings: Timings) -> Self {
        let ms = |duration: std::time::Duration| duration.as_micros() as f64 / 1e3;
        Self { queue_ms: ms(timings.queue), prefill_ms: ms(timings.prefill), decode_ms: ms(timings.decode) }
    }
}

/// Why a text ended, in OpenAI's words.
pub(super) fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        // The one who interrupted it does not read this; whoever asks for it again sees that more was to come.
        FinishReason::Length | FinishReason::Interrupted => "length",
    }
}

/// One text, or a piece of it.
#[derive(Debug, Default, Serialize)]
struct Choice {
    index: usize,
    text: String,
    /// Always null: log probabilities are refused.
    logprobs: Option<()>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<TimingsMs>,
}

/// Seconds since 1970.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// What all objects of one answer have in common.
#[derive(Clone, Debug)]
pub(super) struct Head {
    pub(super) id: String,
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) system_fingerprint: String,
}

impl Head {
    /// That of a new answer, whose id begins with `prefix`.
    pub(super) fn new(prefix: &str, served: &Served) -> Self {
        Self {
            id: format!("{prefix}-{:032x}", rand::rng().random::<u128>()),
            created: now(),
            model: served.name.clone(),
            system_fingerprint: served.fingerprint.clone(),
        }
    }

    /// The JSON of one object of the answer.
    pub(super) fn json<C: Serialize>(
        &self,
        object: &'static str,
        choices: &[C],
        usage: UsageField,
        kept: &Kept,
    ) -> String {
        let Self { id, created, model, system_fingerprint } = self;
        let (session, state, created) = (kept.session.as_ref(), kept.state.as_deref(), *created);
        let completion = Completion { id, object, created, model, system_fingerprint, choices, usage, session, state };
        // Strings, numbers and lists of them: there is nothing in it that JSON cannot say.
        serde_json::to_string(&completion).unwrap_or_default()
    }
}

#[derive(Serialize)]
struct Completion<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    choices: &'a [C],
    #[serde(skip_serializing_if = "UsageField::is_absent")]
    usage: UsageField,
    #[serde(skip_serializing_if = "Option::is_none")]
    session: Option<&'a SessionInfo>,
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<&'a str>,
}

/// What a request wants to be told.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Wanted {
    pub(super) include_usage: bool,
    pub(super) token_ids: bool,
    /// The texts in one piece at the end: a stream that is not sent again goes without.
    pub(super) whole: bool,
}

/// The format of `/v1/completions`.
pub(super) struct Completions {
    head: Head,
    wanted: Wanted,
    /// The ids of each prompt until they have been sent; none where nobody asked.
    prompts: Vec<Option<Vec<u32>>>,
    /// The texts so far.
    whole: Vec<Choice>,
    kept: Kept,
    usage: UsageField,
}

impl Completions {
    pub(super) fn new(head: Head, wanted: Wanted, prompts: Vec<Vec<u32>>) -> Self {
        let whole = |index| Choice { index, token_ids: wanted.token_ids.then(Vec::new), ..Choice::default() };
        Self {
            whole: (0..prompts.len()).map(whole).collect(),
            prompts: prompts.into_iter().map(|ids| wanted.token_ids.then_some(ids)).collect(),
            head,
            wanted,
            kept: Kept::default(),
            usage: UsageField::Absent,
        }
    }

    fn json(&self, choices: &[Choice], usage: UsageField, kept: &Kept) -> String {
        self.head.json("text_completion", choices, usage, kept)
    }

    fn chunk(&mut self, mut choice: Choice, kept: &Kept) -> Said {
        choice.prompt_token_ids = self.prompts[choice.index].take();
        if self.wanted.whole && self.whole[choice.index].prompt_token_ids.is_none() {
            self.whole[choice.index].prompt_token_ids.clone_from(&choice.prompt_token_ids);
        }
        let usage = if self.wanted.include_usage { UsageField::Later } else { UsageField::Absent };
        Said::data(self.json(&[choice], usage, kept))
    }
}

impl Dialect for Completions {
    fn open(&mut self, _: &mut Vec<Said>) {}

    fn delta(&mut self, index: usize, delta: Delta, out: &mut Vec<Said>) {
        if self.wanted.whole {
            let whole = &mut self.whole[index];
            whole.text.push_str(&delta.text);
            if let Some(ids) = &mut whole.token_ids {
                ids.extend(&delta.token_ids);
            }
        }
        // Without ids there is nothing to say until there is text.
        if !delta.text.is_empty() || self.wanted.token_ids {
            let token_ids = self.wanted.token_ids.then_some(delta.token_ids);
            let choice = Choice { index, text: delta.text, token_ids, ..Choice::default() };
            let said = self.chunk(choice, &Kept::default());
            out.push(said);
        }
    }

    fn end(&mut self, index: usize, finish: &Finish, kept: &Kept, out: &mut Vec<Said>) {
        let (reason, timings) = (Some(finish_reason(finish.reason)), Some(finish.timings.into()));
        let token_ids = self.wanted.token_ids.then(Vec::new);
        let choice = Choice { index, token_ids, finish_reason: reason, timings, ..Choice::default() };
        let said = self.chunk(choice, kept);
        out.push(said);
        let whole = &mut self.whole[index];
        (whole.finish_reason, whole.timings) = (reason, timings);
        self.kept = kept.clone();
    }

    fn close(&mut self, usage: Usage, out: &mut Vec<Said>) {
        self.usage = UsageField::Known(usage);
        if self.wanted.include_usage {
            // The state is large, and has been sent.
            let kept = Kept { state: None, ..self.kept.clone() };
            out.push(Said::data(self.json(&[], self.usage, &kept)));
        }
        out.push(Said::data("[DONE]"));
    }

    fn body(&self) -> String {
        self.json(&self.whole, self.usage, &self.kept)
    }
}

/// A body that has been given before, as the stream that it would have been.
pub(super) fn replay(body: &str, include_usage: bool) -> Vec<Said> {
    let Ok(Value::Object(mut rest)) = serde_json::from_str(body) else { return vec![Said::data("[DONE]")] };
    let usage = rest.remove("usage");
    let mut out = Vec::new();
    if include_usage {
        rest.insert("usage".into(), Value::Null);
    }
    let mut choices = rest.remove("choices").unwrap_or_default();
    if rest.get("object").is_some_and(|object| object == "chat.completion") {
        rest.insert("object".into(), "chat.completion.chunk".into());
        for choice in choices.as_array_mut().into_iter().flatten().filter_map(Value::as_object_mut) {
            let message = choice.remove("message").unwrap_or_default();
            choice.insert("delta".into(), message);
        }
    }
    rest.insert("choices".into(), choices);
    out.push(Said::data(Value::Object(rest.clone()).to_string()));
    if let (true, Some(usage)) = (include_usage, usage) {
        rest.insert("choices".into(), Value::Array(Vec::new()));
        rest.insert("usage".into(), usage);
        out.push(Said::data(Value::Object(rest).to_string()));
    }
    out.push(Said::data("[DONE]"));
    out
}
