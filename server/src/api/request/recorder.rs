//! Records what a request adds to the text of a conversation, while it is read and generated.

use super::messages::PromptMessages;
use crate::api::state::Served;
use crate::engine::Finish;
use crate::session::{AddedMessage, AddedText, Content, Role, Snapshot};

/// Stored size in bytes of a message that consists of tokens: flags, and two numbers.
const MESSAGE_OF_TOKENS: u64 = 21;

/// Records the text that one request adds.
#[derive(Clone, Debug)]
pub(in crate::api) struct TextRecorder {
    /// Tokens before the text, which are in the state that the request starts from.
    read: u64,
    /// How many of `tokens` belong to the text before: those that are pending from the previous request.
    pending: usize,
    /// Where in `tokens` the prompt ends, and where the answer begins. The start token of a translation is between
    /// them, and belongs to neither.
    prompt: usize,
    answer: usize,
    /// Whether the answer continues the previous one.
    continues: bool,
    /// The messages of the prompt; `None` if it is text.
    messages: Option<PromptMessages>,
    /// All tokens since that state.
    tokens: Vec<u32>,
}

impl TextRecorder {
    /// Creates a recorder for a request that continues `base` with `prompt`. `messages` are those of the prompt, if it
    /// consists of messages.
    pub(in crate::api) fn new(
        base: &Snapshot,
        prompt: &[u32],
        messages: Option<PromptMessages>,
        served: &Served,
    ) -> Self {
        let source = served.limits.sources.filter(|_| !prompt.is_empty());
        let (read, mut tokens) = match source {
            // A source replaces everything.
            Some(_) => (0, Vec::new()),
            None => (base.read, base.pending.clone()),
        };
        let continues = prompt.is_empty() && base.answer.as_ref().is_some_and(|answer| answer.open);
        let pending = tokens.len();
        tokens.extend_from_slice(prompt);
        let prompt = tokens.len();
        tokens.extend(source.map(|source| source.start));
        let answer = tokens.len();
        Self { read, pending, prompt, answer, continues, messages, tokens }
    }

    /// Creates a recorder for a request whose prompt is the whole text. If the prompt begins with what `head` has read,
    /// it continues the text of `head`, as far as the two agree.
    pub(in crate::api) fn whole(head: &Snapshot, prompt: &[u32], served: &Served) -> Self {
        let source = served.limits.sources;
        let continues = source.is_none() && head.is_prefix_of(prompt);
        let (read, before) = if continues { (head.read, head.pending.as_slice()) } else { (0, [].as_slice()) };
        // A prefix is shorter than the prompt, so the index is in range.
        let mut tokens = prompt[read as usize..].to_vec();
        let pending = tokens.iter().zip(before).take_while(|(token, pending)| token == pending).count();
        let prompt = tokens.len();
        tokens.extend(source.map(|source| source.start));
        let answer = tokens.len();
        Self { read, pending, prompt, answer, continues: false, messages: None, tokens }
    }

    /// Tokens before the text, which are in the state that the request starts from.
    pub(super) fn read(&self) -> u64 {
        self.read
    }

    /// Returns the most bytes that its messages take when they are stored.
    pub(in crate::api) fn most_message_bytes(&self) -> u64 {
        let messages =
            self.messages.iter().flat_map(|messages| &messages.added).map(AddedMessage::most_bytes).sum::<u64>();
        2 * MESSAGE_OF_TOKENS + messages
    }

    /// Returns what the text has gained when it ends with `snapshot`. If a stop string begins within a token, the last
    /// tokens of `snapshot` are `retokenized`.
    pub(in crate::api) fn end(self, snapshot: &Snapshot, retokenized: &[u32]) -> AddedText {
        let Self { read, pending, prompt, answer, continues, messages, mut tokens } = self;
        // The tokens that ended the text are not part of it.
        let end = usize::try_from(snapshot.tokens().saturating_sub(read)).unwrap_or(usize::MAX);
        tokens.truncate(end.saturating_sub(retokenized.len()));
        // A stop string may begin in the pending tokens.
        let kept = pending.min(tokens.len());
        tokens.extend_from_slice(retokenized);
        let added = tokens.split_off(kept);
        let count = added.len() as u64;
        let [prompt, answer] = [prompt, answer].map(|end| count.min((end - pending) as u64));
        let of_tokens = |role, continues, start, end| {
            let content = Content::Tokens(start, end);
            (start < end).then_some(AddedMessage { role, continues, content, more: None })
        };
        let (mut messages, prefilled) = match messages {
            Some(PromptMessages { added, prefilled }) => (added, prefilled),
            None => (of_tokens(Role::User, false, 0, prompt).into_iter().collect(), false),
        };
        messages.extend(of_tokens(Role::Assistant, continues || prefilled, answer, count));
        AddedText { kept: read + kept as u64, tokens: added, messages }
    }

    /// Like [`Self::end`], for the end of a request; returns `None` if it has no state.
    pub(in crate::api) fn finish(self, finish: &Finish) -> Option<AddedText> {
        let snapshot = finish.snapshot.as_deref()?;
        Some(self.end(snapshot, &finish.retokenized))
    }
}

/// The recorders of a request's texts; empty if the conversation's text is not kept.
#[derive(Debug, Default)]
pub(in crate::api) struct Recorders(Vec<Option<TextRecorder>>);

impl Recorders {
    /// Creates recorders for `texts` texts with the same prompt.
    pub(super) fn new(recorder: &TextRecorder, texts: usize) -> Self {
        Self(vec![Some(recorder.clone()); texts])
    }

    /// Adds generated tokens of the text `index`.
    pub(in crate::api) fn generated(&mut self, index: usize, tokens: &[u32]) {
        if let Some(Some(recorder)) = self.0.get_mut(index) {
            recorder.tokens.extend_from_slice(tokens);
        }
    }

    /// Returns what the text `index` adds to the conversation, once it has ended. `calls` are its tool calls, if it
    /// makes any.
    pub(in crate::api) fn end(&mut self, index: usize, finish: &Finish, calls: Option<String>) -> Option<AddedText> {
        let mut text = self.0.get_mut(index)?.take()?.finish(finish)?;
        if let Some(calls) = calls {
            text.set_tool_calls(&calls);
        }
        Some(text)
    }
}
