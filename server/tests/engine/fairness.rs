//! Tenants share the slots, the queue and prefill. Whatever one tenant submits, another waits for a bounded number of
//! steps.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tidegate_model::{LanguageModel, ModelError};
use tidegate_server::engine::{
    EngineHandle, EngineOptions, EngineThread, Event, EventStream, Failure, PassCost, PassCosts, Request,
    RequestParameters, Start, SubmitError, Tenant, spawn,
};
use tidegate_server::session::Snapshot;

use crate::common::fake::rules;
use crate::common::runs::{LIMITS, collect, greedy};

/// A call to the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    /// A slot was reset for a new text.
    Reset,
    /// A chunk was read: the slot's name, and the number of tokens.
    Chunk(u32, usize),
    /// A decode step was made: the name and slot of each row.
    Step(Vec<(u32, usize)>),
}

/// Fixed pass costs, so that shares are the same on every machine.
const COSTS: PassCosts =
    PassCosts { step: PassCost { base: 2.0, each: 1.0 }, chunk: PassCost { base: 2.0, each: 0.5 } };

/// A scripted model that records its passes. A slot's name is the first token that it read, which shows whose prompt it
/// is. No pass proceeds while a test holds the gate.
struct Recorder {
    names: Vec<Option<u32>>,
    passes: Arc<Mutex<Vec<Pass>>>,
    gate: Arc<Mutex<()>>,
}

impl Recorder {
    fn record(&self, pass: Pass) {
        drop(self.gate.lock());
        self.passes.lock().unwrap().push(pass);
    }

    fn name(&mut self, slot: usize, first: u32) -> u32 {
        *self.names[slot].get_or_insert(first)
    }
}

impl LanguageModel for Recorder {
    fn vocab_size(&self) -> usize {
        256
    }

    fn slots(&self) -> usize {
        self.names.len()
    }

    fn reset(&mut self, slot: usize) -> Result<(), ModelError> {
        self.names[slot] = None;
        self.passes.lock().unwrap().push(Pass::Reset);
        Ok(())
    }

    fn export(&self, _: usize) -> Result<Vec<f32>, ModelError> {
        Ok(Vec::new())
    }

    fn import(&mut self, _: usize, _: &[f32], _: u64) -> Result<(), ModelError> {
        Ok(())
    }

    fn prefill(&mut self, ids: &[u32], slot: usize) -> Result<(), ModelError> {
        let name = self.name(slot, ids[0]);
        self.record(Pass::Chunk(name, ids.len()));
        Ok(())
    }

    fn decode(&mut self, ids: &[u32], slots: &[usize], logits: &mut Vec<f32>) -> Result<(), ModelError> {
        let names = slots.iter().zip(ids).map(|(slot, id)| (self.name(*slot, *id), *slot)).collect();
        self.record(Pass::Step(names));
        logits.clear();
        // Token 7 is always the likeliest, so no text ends by itself.
        logits.extend(ids.iter().flat_map(|_| (0..256).map(|token| f32::from(u8::from(token == 7)))));
        Ok(())
    }
}

/// An engine with a recorder as its model.
pub(super) struct Stage {
    pub(super) engine: EngineHandle,
    pub(super) passes: Arc<Mutex<Vec<Pass>>>,
    pub(super) gate: Arc<Mutex<()>>,
    /// Number of passes before the last call of `submit`.
    since: AtomicU64,
    _thread: EngineThread,
}

impl Stage {
    pub(super) fn new(slots: usize, queue: usize) -> Self {
        let (passes, gate) = (Arc::<Mutex<Vec<Pass>>>::default(), Arc::<Mutex<()>>::default());
        let model = Recorder { names: vec![None; slots], passes: Arc::clone(&passes), gate: Arc::clone(&gate) };
        let options = EngineOptions { queue, pass_costs: Some(COSTS), ..EngineOptions::default() };
        let (engine, thread) = spawn(model, rules(), options).unwrap();
        Self { engine, passes, gate, since: AtomicU64::new(0), _thread: thread }
    }

    /// Submits `count` texts of a tenant between two passes. `lengths` are those of the prompt, which repeats the
    /// tenant's number, and of the text.
    pub(super) fn submit(
        &self,
        tenant: u32,
        count: usize,
        lengths: (usize, usize),
    ) -> Result<Vec<EventStream>, SubmitError> {
        let _held = self.gate.lock().unwrap();
        self.since.store(self.engine.stats().passes, Ordering::Relaxed);
        self.submit_with(tenant, 1, count, lengths)
    }

    /// Like [`Self::submit`], for a tenant of any weight and at any time.
    pub(super) fn submit_with(
        &self,
        tenant: u32,
        weight: u32,
        count: usize,
        (length, tokens): (usize, usize),
    ) -> Result<Vec<EventStream>, SubmitError> {
        let of = Tenant { id: tenant.into(), weight: NonZeroU32::new(weight).unwrap() };
        let mut parameters = greedy(&vec![tenant; length], tokens);
        parameters.ignore_eos = true;
        let requests = (0..count).map(|_| Request::new(parameters.clone(), &LIMITS).unwrap()).collect();
        self.engine.submit_for(of, requests)
    }

    /// Waits until the engine has made `count` passes since the last call of `submit`. Counting from now on could wait
    /// forever: a text that nobody reads pauses, perhaps before this thread runs again.
    pub(super) fn passes_since(&self, count: u64) {
        self.wait_for_passes(self.since.load(Ordering::Relaxed) + count);
    }

    /// Waits until the engine has made `count` more passes. Somebody must read a text meanwhile.
    pub(super) fn passes_more(&self, count: u64) {
        self.wait_for_passes(self.engine.stats().passes + count);
    }

    fn wait_for_passes(&self, count: u64) {
        while self.engine.stats().passes < count {
            std::thread::yield_now();
        }
    }
}

/// Reads texts to their ends; returns for how many passes each one waited for its slot.
fn waited(streams: Vec<EventStream>) -> Vec<u64> {
    streams.into_iter().map(|stream| collect(stream).finish().timings.queue_steps).collect()
}

pub(super) const ABUSER: u32 = 1;
pub(super) const POLITE: u32 = 2;
const THIRD: u32 = 3;
pub(super) const ENDLESS: (usize, usize) = (1, 1_000_000);
const SHORT: (usize, usize) = (1, 3);

#[test]
fn a_tenant_with_endless_texts_leaves_a_slot_for_each_of_the_others() {
    let stage = Stage::new(8, 300);
    stage.engine.expect_tenants(3);
    let endless = stage.submit(ABUSER, 200, ENDLESS).unwrap();
    stage.passes_since(50);
    assert_eq!((stage.engine.stats().running, stage.engine.stats().waiting), (6, 194));
    for _ in 0..20 {
        for tenant in [POLITE, THIRD] {
            let waited = waited(stage.submit(tenant, 1, SHORT).unwrap());
            // The engine notices the request at the latest when the pass in progress ends.
            assert!(waited[0] <= 2, "{waited:?}");
        }
    }
    // Several texts of one tenant take turns in its one slot.
    let several = waited(stage.submit(POLITE, 4, SHORT).unwrap());
    assert!(several.iter().all(|passes| *passes <= 4 * 4), "{several:?}");
    assert_eq!(stage.engine.stats().waiting, 194, "the others still wait");
    drop(endless);
}

#[test]
fn a_tenant_alone_has_all_slots() {
    let stage = Stage::new(8, 300);
    let endless = stage.submit(ABUSER, 20, ENDLESS).unwrap();
    stage.passes_since(5);
    assert_eq!((stage.engine.stats().running, stage.engine.stats().waiting), (8, 12));
    drop(endless);
}

#[test]
fn free_slots_go_to_the_tenant_that_has_had_the_least_work() {
    let stage = Stage::new(2, 300);
    let gate = stage.gate.lock().unwrap();
    let streams: Vec<_> = [(ABUSER, 100), (POLITE, 10)]
        .map(|(tenant, count)| (tenant, stage.submit_with(tenant, 1, count, (1, 10)).unwrap()))
        .into();
    drop(gate);
    let [abuser, polite]: [Vec<u64>; 2] =
        streams.into_iter().map(|(_, streams)| waited(streams)).collect::<Vec<_>>().try_into().unwrap();
    // Each tenant has one of the two slots. The tenth text waits for nine others of ten steps each, and for one more if
    // the other tenant had both slots at first.
    assert!(polite.iter().all(|passes| *passes <= 10 * 10 + 5), "{polite:?}");
    assert!(*abuser.last().unwrap() > 500, "{abuser:?}");
}

#[test]
fn a_tenant_gets_work_in_proportion_to_its_weight() {
    let stage = Stage::new(4, 2000);
    let gate = stage.gate.lock().unwrap();
    let light = stage.submit_with(ABUSER, 1, 400, (1, 10)).unwrap();
    let heavy = stage.submit_with(POLITE, 3, 400, (1, 10)).unwrap();
    drop(gate);
    drop(waited(heavy));
    drop(light);
    let passes = stage.passes.lock().unwrap();
    let rows = |tenant: u32| {
        let rows = |pass: &Pass| match pass {
            Pass::Step(rows) => rows.iter().filter(|(name, _)| *name == tenant).count(),
            Pass::Chunk(..) | Pass::Reset => 0,
        };
        // In these passes, both tenants still have waiting texts.
        passes.iter().take(800).map(rows).sum::<usize>()
    };
    let (light, heavy) = (rows(ABUSER), rows(POLITE));
    assert!((heavy as f64 / light as f64 - 3.0).abs() < 0.3, "{heavy} to {light}");
}

#[test]
fn a_long_text_that_a_stop_string_ends_is_read_again_between_the_steps_of_others() {
    let stage = Stage::new(2, 300);
    let mut parameters = RequestParameters {
        start: Start::Session(Arc::new(Snapshot::empty(0))),
        snapshot: true,
        // The model always chooses token 7. Each one after the first could end the text, but for `min_tokens`.
        stop: vec!["\u{7}\u{7}".into()],
        min_tokens: 2000,
        ..greedy(&[ABUSER], 3000)
    };
    parameters.ignore_eos = true;
    let request = Request::new(parameters, &LIMITS).unwrap();
    let gate = stage.gate.lock().unwrap();
    let polite = stage.submit_with(POLITE, 1, 1, (1, 4000)).unwrap();
    let of = Tenant { id: ABUSER.into(), weight: NonZeroU32::MIN };
    let rolled_back = stage.engine.submit_for(of, vec![request]).unwrap();
    drop(gate);
    let polite = std::thread::spawn(|| waited(polite));
    let text = collect(rolled_back.into_iter().next().unwrap());
    let again = text.finish().retokenized.len();
    drop(polite.join());
    assert!(again > 1900, "{again}");
    let passes = stage.passes.lock().unwrap();
    let chunks: Vec<(usize, usize)> = passes
        .iter()
        .enumerate()
        .filter_map(|(at, pass)| if let Pass::Chunk(ABUSER, tokens) = pass { Some((at, *tokens)) } else { None })
        .collect();
    assert_eq!(chunks.iter().map(|(_, tokens)| tokens).sum::<usize>(), again);
    for pair in chunks.windows(2) {
        let between = &passes[pair[0].0..pair[1].0];
        assert!(between.iter().any(|pass| matches!(pass, Pass::Step(rows) if rows[0].0 == POLITE)), "{pair:?}");
    }
    assert!(chunks.len() > 3, "{chunks:?}");
}

#[test]
fn a_pause_earns_no_credit() {
    let stage = Stage::new(1, 2000);
    // One tenant has worked for a long time when the other arrives. The other does not get every slot to catch up.
    let first = stage.submit(ABUSER, 1000, (1, 20)).unwrap();
    stage.passes_since(500);
    let late = stage.submit(POLITE, 20, (1, 20)).unwrap();
    drop(waited(late));
    let passes = stage.passes.lock().unwrap();
    let owners: Vec<u32> = passes
        .iter()
        .filter_map(|pass| if let Pass::Step(rows) = pass { Some(rows.first()?.0) } else { None })
        .collect();
    let from = owners.iter().position(|owner| *owner == POLITE).unwrap();
    let to = owners.iter().rposition(|owner| *owner == POLITE).unwrap();
    let other = owners[from..to].iter().filter(|owner| **owner == ABUSER).count();
    assert!((300..=480).contains(&other), "they take turns: {other} steps of {}", to - from);
    drop(first);
}

#[test]
fn many_long_prompts_of_a_tenant_delay_another_by_one_chunk_each() {
    let stage = Stage::new(64, 300);
    stage.engine.expect_tenants(2);
    let long = stage.submit(ABUSER, 63, (20_000, 1)).unwrap();
    stage.passes_since(10);
    let held = stage.gate.lock().unwrap();
    let before = stage.passes.lock().unwrap().len();
    // This prompt takes three chunks.
    let polite = stage.submit_with(POLITE, 1, 1, (700, 2)).unwrap();
    drop(held);
    drop(waited(polite));
    let passes = stage.passes.lock().unwrap();
    let last = passes.iter().rposition(|pass| matches!(pass, Pass::Chunk(POLITE, _))).unwrap();
    let of_other = |pass: &Pass| if let Pass::Chunk(ABUSER, tokens) = pass { *tokens } else { 0 };
    let tokens: usize = passes[before..last].iter().map(of_other).sum();
    assert!(tokens <= (3 + 3) * 256, "{tokens} tokens of the other came first");
    drop(passes);
    drop(long);
}

#[test]
fn a_full_queue_makes_room_for_the_tenant_that_has_less_in_it() {
    let stage = Stage::new(1, 8);
    let running = stage.submit(THIRD, 1, ENDLESS).unwrap();
    stage.passes_since(2);
    let mut full = stage.submit(ABUSER, 8, SHORT).unwrap();
    assert_eq!(stage.submit(ABUSER, 1, SHORT).unwrap_err(), SubmitError::QueueFull);
    let polite = stage.submit(POLITE, 4, SHORT).unwrap();
    assert_eq!(stage.engine.stats().waiting, 8);
    assert_eq!(stage.engine.stats().displaced, 4);
    // Each tenant has its half of the queue.
    assert_eq!(stage.submit(POLITE, 1, SHORT).unwrap_err(), SubmitError::QueueFull);
    assert_eq!(stage.submit(ABUSER, 1, SHORT).unwrap_err(), SubmitError::QueueFull);
    // A tenant with more weight has a right to more, but its texts are accepted together or not at all.
    assert_eq!(stage.submit_with(9, 2, 5, SHORT).unwrap_err(), SubmitError::QueueFull);
    assert_eq!(stage.engine.stats().displaced, 4, "a refusal displaces nobody");
    let heavy = stage.submit_with(9, 2, 3, SHORT).unwrap();
    assert_eq!(stage.engine.stats().waiting, 8);
    // The newest texts had to leave.
    for mut stream in full.drain(4..) {
        assert_eq!(stream.blocking_next(), Some(Event::Failed(Failure::Displaced)));
    }
    drop(running);
    assert_eq!(waited(heavy).len(), 3);
    let ended: Vec<_> = full.into_iter().chain(polite).map(|stream| collect(stream).end.unwrap()).collect();
    assert_eq!(ended.iter().filter(|end| **end == Err(Failure::Displaced)).count(), 3);
    assert_eq!(ended.iter().filter(|end| end.is_ok()).count(), 5);
}
