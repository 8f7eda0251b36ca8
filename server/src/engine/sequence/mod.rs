//! One request in a slot: how much has been read, and what has been made of it so far.

mod mark;
mod prompt;

use std::sync::Arc;
use std::time::Instant;

use tidegate_model::sampling::{Permitted, Plans, Sampler};
use tracing::Span;

use crate::engine::constraint::Grammar;
use crate::engine::ends::{Ending, Ends};
use crate::engine::event::{Finish, Interrupt, Timings, TokenLogprobs};
use crate::engine::guarded::Fault;
use crate::engine::guide::Guide;
use crate::engine::inbox::Submission;
use crate::engine::outlet::Outlet;
use crate::engine::request::{Keep, Request};
use crate::engine::scores::{PromptScores, Scores};
use crate::engine::shared::SharedPrompt;
use crate::session::{Answer, History, Snapshot};
use crate::text::{Detokenizer, StopMatcher, Vocabulary};

pub(in crate::engine) use mark::Mark;
pub(in crate::engine) use prompt::ReadBy;
use prompt::Source;

/// Tokens of a prompt that are read between two decode steps.
const PROMPT_CHUNK: usize = 256;

/// From a piece of text to its tokens.
pub type Encode = Arc<dyn Fn(&str) -> Vec<u32> + Send + Sync>;

/// What the engine knows about text.
pub struct TextRules {
    /// The bytes of each token.
    pub vocabulary: Arc<Vocabulary>,
    /// Tokens that end a text.
    pub eos: Arc<[u32]>,
    /// The tokens of a piece of text.
    pub encode: Encode,
}

/// One running request.
pub(in crate::engine) struct Sequence {
    pub(in crate::engine) start: Option<Arc<Snapshot>>,
    /// The prompt, where it is a source: it is read before `input`.
    source: Source,
    /// The tokens to read before the first is chosen.
    input: Vec<u32>,
    /// How many of them are in the state; the last is read by the decode step that chooses the first.
    absorbed: usize,
    /// Tokens in the state, those before this request included.
    pub(in crate::engine) read: u64,
    pub(in crate::engine) history: History,
    /// The last token of the text: it is not in the state yet. `None` until the input before has been read.
    pub(in crate::engine) pending_token: Option<u32>,
    generated: usize,
    prompt_tokens: usize,
    max_tokens: usize,
    ends: Ends,
    scores: Option<Scores>,
    /// The scores of the prompt until they are told.
    prompt_scores: Option<PromptScores>,
    /// What it has in common with other requests, until its prompt has been read.
    pub(in crate::engine) shared: Option<Arc<SharedPrompt>>,
    pub(in crate::engine) read_by: ReadBy,
    grammar: Option<Arc<dyn Grammar>>,
    guide: Option<Guide>,
    /// Whether what is generated is an answer that can be gone on with.
    pub(in crate::engine) is_turn: bool,
    continues: bool,
    pub(in crate::engine) keep: Keep,
    pub(in crate::engine) sampler: Sampler,
    detokenizer: Detokenizer,
    stops: StopMatcher,
    carried: String,
    pub(in crate::engine) mark: Option<Mark>,
    /// The text of the token before which a mark has to be made; `None` where none has to.
    mark_wanted: Option<String>,
    clock: Clock,
    pub(in crate::engine) interrupt: Interrupt,
    pub(in crate::engine) outlet: Outlet,
    pub(in crate::engine) span: Span,
}

/// A token that a request has chosen, with its log probabilities where they were asked for.
pub(in crate::engine) struct Choice {
    token: u32,
    scored: Option<TokenLogprobs>,
}

impl Choice {
    pub(in crate::engine) fn unscored(token: u32) -> Self {
        Self { token, scored: None }
    }
}

/// What a token's text is put together in, kept from token to token.
#[derive(Default)]
pub(in crate::engine) struct TextBuffers {
    /// What a token shows, after what was carried over to it.
    text: String,
    /// The characters that it completes, some of which may be held back.
    characters: String,
}

struct Clock {
    submitted: Instant,
    admitted: Instant,
    first_token: Option<Instant>,
}

impl Sequence {
    pub(in crate::engine) fn new(submission: Submission, rules: &TextRules) -> Self {
        let Submission { request, sender, interrupt, submitted, span } = submission;
        let prompt_tokens = request.prompt_tokens();
        let Request {
            start,
            source,
            input,
            last,
            max_tokens,
            sampler,
            mut detokenizer,
            stops,
            carried,
            ends,
            logprobs,
            prompt_logprobs,
            shared,
            grammar,
            is_turn,
            continues,
            keep,
            ..
        } = request;
        if !continues {
            // The text completes what the prompt has begun: these bytes are shown by nobody else.
            detokenizer = Detokenizer::resume(&rules.vocabulary.unfinished(&last));
        }
        let mut sequence = Self {
            read: start.as_ref().map_or(0, |start| start.read),
            history: start.as_ref().map_or(History::default(), |start| start.history),
            start,
            source: if source.is_empty() { Source::Absent } else { Source::Unread(source) },
            input,
            absorbed: 0,
            pending_token: None,
            generated: 0,
            prompt_tokens,
            max_tokens,
            ends,
            scores: logprobs.map(Scores::new),
            prompt_scores: prompt_logprobs.map(PromptScores::new),
            shared,
            read_by: ReadBy::Itself,
            grammar,
            guide: None,
            is_turn,
            continues,
            keep,
            sampler,
            detokenizer,
            stops,
            carried,
            mark: None,
            mark_wanted: None,
            clock: Clock { submitted, admitted: Instant::now(), first_token: None },
            interrupt,
            outlet: Outlet::new(sender),
            span,
        };
        if sequence.continues && sequence.is_unsettled() {
            sequence.mark = sequence.start.as_deref().and_then(|start| Mark::before(start, rules));
        }
        sequence.absorb(0);
        sequence
    }

    /// Starts the grammar that the text must follow, where there is one.
    pub(in crate::engine) fn start_grammar(&mut self, vocab_size: usize) {
        self.guide = self.grammar.take().map(|grammar| Guide::new(grammar.as_ref(), vocab_size));
    }

    /// What holds the text to its grammar.
    pub(in crate::engine) fn guide(&mut self) -> Option<&mut Guide> {
        self.guide.as_mut()
    }

    /// Whether more tokens are to come.
    pub(in crate::engine) fn wants_tokens(&self) -> bool {
        self.generated < self.max_tokens
    }

    /// The token to decode next; `None` where the prompt is still being read or the reader is too far behind.
    pub(in crate::engine) fn decodable(&self) -> Option<u32> {
        if self.reads_by_steps() {
            return self.next_chunk().first().copied().filter(|_| self.read_by == ReadBy::Itself);
        }
        self.pending_token.filter(|_| !self.outlet.is_full())
    }

    /// Adds the token that was chosen from the logits after the pending one, and its text; says whether that ends the
    /// text.
    ///
    /// # Errors
    /// The text cannot follow its grammar any further.
    pub(in crate::engine) fn accept(
        &mut self,
        chosen: Choice,
        rules: &TextRules,
        buffers: &mut TextBuffers,
    ) -> Result<Option<Ending>, Fault> {
        if let Some(read) = self.pending_token.take() {
            self.read += 1;
            self.history = self.history.extended(&[read]);
        }
        let Choice { token, scored } = chosen;
        self.pending_token = Some(token);
        self.generated += 1;
        self.clock.first_token.get_or_insert_with(Instant::now);

        buffers.text.clear();
        buffers.text.push_str(&self.carried);
        self.carried.clear();
        let carried = buffers.text.len();
        let ending = self.ending(token, rules, buffers)?;
        self.note(token, &buffers.text, carried);
        self.outlet.push(token, &buffers.text, scored);
        Ok(ending)
    }

    /// Chooses the next token from `logits` (vocab), which are changed; may be called on any thread.
    ///
    /// # Errors
    /// No logit is a number: the weights or the state are broken, and any token would be a lie. Or the grammar has no
    /// mask.
    pub(in crate::engine) fn choose(&mut self, logits: &mut [f32], rules: &TextRules) -> Result<Choice, Fault> {
        if let Some(scores) = &mut self.scores {
            scores.keep(logits);
        }
        let possible = logits.iter().any(|logit| *logit > f32::NEG_INFINITY);
        if let Some(guide) = &self.guide {
            guide.allowed()?.apply(logits);
        }
        if !self.ends.may_follow(self.generated + 1) {
            self.ends.forbid(&rules.eos, logits);
        }
        let token = match self.sampler.sample(logits) {
            Some(token) => token,
            None => self.end_of_grammar(possible, rules)?,
        };
        Ok(Choice { token, scored: self.scores.as_mut().map(|scores| scores.score(token)) })
    }

    /// Adds to `plans` how a device is to choose the next token, or that the logits are wanted.
    ///
    /// # Errors
    /// The grammar has no mask.
    pub(in crate::engine) fn plan(&mut self, plans: &mut Plans, rules: &TextRules) -> Result<(), Fault> {
        if self.scores.is_none() {
            let allowed = self.guide.as_ref().map(Guide::allowed).transpose()?;
            let waits = !self.ends.may_follow(self.generated + 1);
            let ends: Vec<u32> = self.ends.tokens(&rules.eos).filter(|_| waits).collect();
            self.sampler.plan(Permitted { allowed, last_resort: &ends }, plans);
        }
        Ok(())
    }

    /// Takes the token that was chosen by the plan.
    pub(in crate::engine) fn take(&mut self, token: u32) -> Choice {
        self.sampler.take(token);
        Choice::unscored(token)
    }

    /// The end of a text none of whose tokens can be chosen, where all that its grammar allows is impossible for the
    /// model: where the text may end, it does.
    ///
    /// # Errors
    /// It may not, or no token was possible before the grammar.
    pub(in crate::engine) fn end_of_grammar(&self, possible: bool, rules: &TextRules) -> Result<u32, Fault> {
        let mut eos = rules.eos.iter().copied().filter(|_| possible);
        let allowed = eos.find(|token| self.guide.as_ref().is_some_and(|guide| guide.allows(*token)));
        allowed.ok_or_else(|| Fault::internal("no token can be chosen: no logit is a number"))
    }

    /// Adds to the text what `token`, the last that was chosen, shows; whether and how the text ends with it.
    fn ending(&mut self, token: u32, rules: &TextRules, buffers: &mut TextBuffers) -> Result<Option<Ending>, Fault> {
        let TextBuffers { text, characters } = buffers;
        if let Some(ending) = self.ends.by(token, &rules.eos) {
            return Ok(Some(self.close(ending, text)));
        }
        characters.clear();
        self.detokenizer.push(rules.vocabulary.bytes(token), characters);
        let whole = self.guide.as_mut().map(|guide| guide.accept(token)).transpose()?.unwrap_or(false);
        Ok(if self.shows(characters, text) {
            Some(Ending::StopString)
        } else if whole {
            Some(self.close(Ending::Grammar, text))
        } else if self.wants_tokens() {
            None
        } else if self.is_turn {
            // The next turn goes on here: what is held back stays so.
            Some(Ending::Length)
        } else {
            Some(self.close(Ending::Length, text))
        })
    }

    /// Takes in the characters that the last token has brought; whether a stop string has ended the text.
    fn shows(&mut self, characters: &str, text: &mut String) -> bool {
        if self.ends.may_follow(self.generated) {
            return self.stops.push(characters, text);
        }
        self.stops.pass(characters, text);
        false
    }

    /// Ends a text that no stop string has ended, and lets out what was held back.
    fn close(&mut self, ending: Ending, text: &mut String) -> Ending {
        let mut rest = String::new();
        self.detokenizer.finish(&mut rest);
        if self.shows(&rest, text) {
            return Ending::StopString;
        }
        self.stops.finish(text);
        ending
    }

    /// The answer at the end of a turn; `None` where there is none.
    pub(in crate::engine) fn answer(&self, open: bool) -> Option<Answer> {
        // Also where it was interrupted before its first token: the text has its opening.
        let answers = self.is_turn && (self.max_tokens > 0 || self.continues);
        answers.then(|| {
            if !open {
                return Answer::default();
            }
            let held = self.carried.clone() + self.stops.held();
            Answer { open, held, bytes: self.detokenizer.pending().into() }
        })
    }

    /// The account of a text that has ended.
    pub(in crate::engine) fn finish(&self, ending: Ending, snapshot: Option<Arc<Snapshot>>) -> Finish {
        let now = Instant::now();
        let first_token = self.clock.first_token.unwrap_or(now);
        Finish {
            reason: ending.reason(),
            stop: ending.cause(self.stops.found()),
            cumulative_logprob: self.scores.as_ref().map(Scores::sum),
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.generated,
            timings: Timings {
                queue: self.clock.admitted - self.clock.submitted,
                prefill: first_token - self.clock.admitted,
                decode: now - first_token,
            },
            snapshot,
        }
    }
}
