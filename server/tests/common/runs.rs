//! Requests to an engine without an HTTP server, and their results.

use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use tidegate_model::SamplingParams;
use tidegate_server::Served;
use tidegate_server::checkpoint::{OpenOptions, open};
use tidegate_server::engine::{
    EngineHandle, EngineOptions, EngineThread, Event, EventStream, Failure, Finish, Keeper, Limits, Request,
    RequestParameters, TakeSnapshots, TokenLogprobs, spawn,
};
use tidegate_server::session::Snapshot;

use super::checkpoint;
use super::fake::{Fake, rules};

/// The limits of a scripted model.
pub(crate) const LIMITS: Limits =
    Limits { vocab_size: 256, max_prompt_tokens: 40_000, max_tokens: 1_000_000, sources: None };

/// Starts an engine with a scripted model.
pub(crate) fn start(fake: Fake) -> (EngineHandle, EngineThread) {
    spawn(fake, rules(), EngineOptions::default()).unwrap()
}

/// Returns the parameters of a greedy request.
pub(crate) fn greedy(prompt: &[u32], max_tokens: usize) -> RequestParameters {
    let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    RequestParameters { prompt: prompt.into(), max_tokens, sampling, ..RequestParameters::default() }
}

/// Waits until `condition` holds.
pub(crate) fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(20), "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Collects the snapshots that a request takes for other requests.
#[derive(Debug, Default)]
pub(crate) struct Taken(Mutex<Vec<Arc<Snapshot>>>);

impl Taken {
    pub(crate) fn all(&self) -> Vec<Arc<Snapshot>> {
        self.0.lock().unwrap().clone()
    }
}

impl TakeSnapshots for Taken {
    fn take(&self, snapshot: &Arc<Snapshot>) {
        self.0.lock().unwrap().push(Arc::clone(snapshot));
    }
}

/// Adds a keeper to a request; also returns the receiver of the prompt's snapshot.
pub(crate) fn kept(parameters: RequestParameters) -> (RequestParameters, Arc<Taken>) {
    kept_at(None, parameters)
}

/// Like [`kept`], with another snapshot after `mark` tokens of the prompt.
pub(crate) fn kept_at(mark: Option<usize>, parameters: RequestParameters) -> (RequestParameters, Arc<Taken>) {
    let taken = Arc::<Taken>::default();
    let keeper = Some(Keeper { taker: Arc::clone(&taken) as _, mark, end: false });
    (RequestParameters { keeper, ..parameters }, taken)
}

/// The result of one request.
#[derive(Debug, Default)]
pub(crate) struct Run {
    pub(crate) text: String,
    pub(crate) ids: Vec<u32>,
    pub(crate) logprobs: Vec<TokenLogprobs>,
    pub(crate) prompt_logprobs: Option<Vec<Option<TokenLogprobs>>>,
    pub(crate) end: Option<Result<Finish, Failure>>,
}

impl Run {
    pub(crate) fn finish(&self) -> &Finish {
        match &self.end {
            Some(Ok(finish)) => finish,
            other => panic!("{other:?}"),
        }
    }
}

/// Returns the shipped checkpoint without an HTTP server; it is opened once per test binary.
pub(crate) fn shipped() -> &'static Served {
    static SERVED: LazyLock<Served> = LazyLock::new(|| open(&checkpoint(), &OpenOptions::default()).unwrap().0);
    &SERVED
}

/// Reads all events of a request.
pub(crate) fn collect(mut stream: EventStream) -> Run {
    let mut run = Run::default();
    while let Some(event) = stream.blocking_next() {
        assert!(run.end.is_none(), "an event after the end");
        match event {
            Event::PromptLogprobs(scores) => {
                assert!(run.ids.is_empty());
                run.prompt_logprobs = Some(scores);
            }
            Event::Delta(delta) => {
                run.text.push_str(&delta.text);
                run.ids.extend(delta.token_ids);
                run.logprobs.extend(delta.logprobs);
            }
            Event::Finished(finish) => run.end = Some(Ok(finish)),
            Event::Failed(failure) => run.end = Some(Err(failure)),
        }
    }
    run
}

/// Runs one request on a scripted model.
pub(crate) fn run(engine: &EngineHandle, parameters: RequestParameters) -> Run {
    collect(engine.submit(Request::new(parameters, &LIMITS).unwrap()).unwrap())
}
