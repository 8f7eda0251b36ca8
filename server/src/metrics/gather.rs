//! Metrics read at each scrape from the engine, the prefix index, the store and the system.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

use super::histogram::{Counted, Times};
use super::labels::{PREFIX, TierLabel};
use super::process::Process;
use crate::engine::{EngineHandle, ROWS_BOUNDS, Stats};
use crate::session::{Latency, PrefixIndex, StoreStats};

/// The statistics of a store, and the latencies of its index and of its object store.
pub(crate) type Stored = (StoreStats, [Vec<Latency>; 2]);

/// The values that a scrape reads.
#[derive(Default)]
pub(crate) struct Sources<'a> {
    /// Whether `/ready` answers 200.
    pub(crate) ready: bool,
    /// The model of a server that has only one.
    pub(crate) model: Option<Model<'a>>,
    pub(crate) store: Option<Stored>,
    /// The models of a server that may have several. Their metrics have the model's name as the label `model`.
    pub(crate) models: Vec<Member<'a>>,
}

/// One of several models.
pub(crate) struct Member<'a> {
    pub(crate) name: &'a str,
    pub(crate) state: &'static str,
    pub(crate) loads: u64,
    pub(crate) unloads: u64,
    /// `None` while the model is not loaded.
    pub(crate) model: Option<Model<'a>>,
    pub(crate) store: Option<Stored>,
}

/// A served model.
#[derive(Clone, Copy)]
pub(crate) struct Model<'a> {
    pub(crate) name: &'a str,
    pub(crate) fingerprint: &'a str,
    pub(crate) device: &'a str,
    pub(crate) engine: &'a EngineHandle,
    pub(crate) prefixes: &'a PrefixIndex,
}

fn gauge(registry: &mut Registry, name: &str, help: &str, value: u64) {
    registry.register(name, help, ConstGauge::new(value));
}

fn counter(registry: &mut Registry, name: &str, help: &str, value: u64) {
    registry.register(name, help, ConstCounter::new(value));
}

/// The labels of one of several models.
type ModelLabel = Vec<(&'static str, String)>;

/// Returns counters that differ in one label.
fn counters(name: &'static str, values: &[(&'static str, u64)]) -> Family<Vec<(&'static str, &'static str)>, Counter> {
    let family = Family::<Vec<(&str, &str)>, Counter>::default();
    for (value, count) in values {
        family.get_or_create(&vec![(name, *value)]).inc_by(*count);
    }
    family
}

impl Sources<'_> {
    pub(super) fn registry(&self) -> Registry {
        let mut registry = Registry::with_prefix(PREFIX);
        let version = env!("CARGO_PKG_VERSION");
        registry.register("build", "The server's version", Info::new(vec![("version", version)]));
        gauge(&mut registry, "ready", "1 if the server takes requests and can store sessions", self.ready.into());
        if self.models.is_empty() {
            let name = self.model.as_ref().map(|model| ("model", model.name));
            of_model(&mut registry, name, self.model.as_ref(), self.store.as_ref());
        } else {
            self.states(&mut registry);
        }
        registry
    }

    /// Returns one registry for each of several models.
    pub(super) fn of_models(&self) -> Vec<Registry> {
        let of = |member: &Member<'_>| {
            let label = std::iter::once(("model".into(), member.name.to_owned().into()));
            let mut registry = Registry::with_prefix_and_labels(PREFIX, label);
            of_model(&mut registry, None, member.model.as_ref(), member.store.as_ref());
            registry
        };
        self.models.iter().map(of).collect()
    }

    /// Registers the states of several models, and how often each was loaded and unloaded.
    fn states(&self, registry: &mut Registry) {
        let states = Family::<ModelLabel, Gauge<u64, AtomicU64>>::default();
        let (loads, unloads) = (Family::<ModelLabel, Counter>::default(), Family::<ModelLabel, Counter>::default());
        for member in &self.models {
            let label: ModelLabel = vec![("model", member.name.to_owned())];
            loads.get_or_create(&label).inc_by(member.loads);
            unloads.get_or_create(&label).inc_by(member.unloads);
            let state = ("state", member.state.to_owned());
            states.get_or_create(&[label, vec![state]].concat()).set(1);
        }
        registry.register("model_state", "1 for the state of each model", states);
        registry.register("model_loads", "How often each model was loaded", loads);
        let help = "How often each model was unloaded, because another one needed its memory";
        registry.register("model_unloads", help, unloads);
    }
}

/// Registers the metrics of one model and its sessions. `name` becomes a label of the metric that describes the model.
fn of_model(
    registry: &mut Registry,
    name: Option<(&'static str, &str)>,
    model: Option<&Model<'_>>,
    stored: Option<&Stored>,
) {
    let (mut slots, mut prefixes) = (0, 0);
    if let Some(model) = model {
        let labels = name.into_iter().chain([("fingerprint", model.fingerprint), ("device", model.device)]);
        let labels: Vec<_> = labels.map(|(name, value)| (name, value.to_owned())).collect();
        registry.register("model", "The served model", Info::new(labels));
        let stats = model.engine.stats();
        engine(registry, &stats, model.engine.queue_capacity());
        prefix(registry, model.prefixes);
        (slots, prefixes) = (stats.slots * stats.slot_bytes, model.prefixes.size().1 as u64);
    }
    let mut tiers = vec![("slots", slots), ("prefixes", prefixes)];
    if let Some((stats, [index, objects])) = stored {
        back_end(registry, "index", "index", index);
        back_end(registry, "object_store", "object store", objects);
        tiers.extend([("memory", stats.ram_bytes), ("disk", stats.disk_bytes), ("garbage", stats.garbage_bytes)]);
        tiers.push(("text", stats.text_bytes));
        store(registry, stats);
    }
    let states = Family::<TierLabel, Gauge<u64, AtomicU64>>::default();
    for (tier, bytes) in tiers {
        states.get_or_create(&TierLabel { tier }).set(bytes);
    }
    let help = "Bytes of conversation states: in slots, as shared prefixes, cached in memory, on disk, and on \
        disk awaiting removal; and bytes of texts";
    registry.register_with_unit("state", help, Unit::Bytes, states);
}

fn engine(registry: &mut Registry, stats: &Stats, queue: usize) {
    gauge(registry, "num_requests_running", "Texts being generated", stats.running);
    gauge(registry, "num_requests_waiting", "Texts waiting for a slot", stats.waiting);
    gauge(registry, "queue_capacity", "Most texts that may wait for a slot", queue as u64);
    gauge(registry, "slots", "Slots: texts that can run at once", stats.slots);
    gauge(registry, "slots_used", "Slots in use", stats.running);
    let help = "Share of the slots in use, from 0 to 1: what the usage of a KV cache is elsewhere";
    let usage = stats.running as f64 / stats.slots.max(1) as f64;
    registry.register("kv_cache_usage_perc", help, ConstGauge::new(usage));
    counter(registry, "engine_steps", "Chunks of prompts read and decode steps", stats.passes);
    counter(registry, "requests_admitted", "Texts that got a slot", stats.admitted);
    let help = "Engine steps from the submission of texts to their slots, for all that got one";
    counter(registry, "requests_admitted_wait_steps", help, stats.waited_passes);
    let help = "Waiting texts that made room in a full queue for those of other keys";
    counter(registry, "requests_displaced", help, stats.displaced);
    let help = "Prompt tokens computed, including those of failed and cancelled texts";
    counter(registry, "prompt_tokens_computed", help, stats.prompt_tokens);
    let help = "Tokens generated, including those of failed and cancelled texts";
    counter(registry, "generation_tokens", help, stats.generated_tokens);
    let help = "Tokens generated that a grammar left no choice of, taken without a decode step";
    counter(registry, "generation_tokens_forced", help, stats.forced_tokens);
    let help = "Drafts read by the model: tokens proposed from what the text has had before";
    counter(registry, "generation_tokens_drafted", help, stats.drafted_tokens);
    let help = "Drafts kept: those that a text's sampler has chosen, each of which saved a decode step";
    counter(registry, "generation_tokens_draft_accepted", help, stats.accepted_drafts);
    let bounds = ROWS_BOUNDS.iter().map(|rows| *rows as f64).chain([f64::INFINITY]);
    let buckets = bounds.zip(stats.steps_by_rows).collect();
    let help = "Rows per decode step: texts that advance together";
    registry.register("decode_batch_size", help, Counted { buckets, sum: stats.rows as f64 });
    let help = "Rows that were ready for a decode step and waited for a later one, so that other keys' steps are short";
    counter(registry, "decode_rows_waited", help, stats.rows_waited);
    let help = "Denominators (phi_q . z) of attention, one per token, layer and head";
    counter(registry, "attention_denominators", help, stats.denominators.all);
    let help = "Denominators clamped to their lower bound";
    counter(registry, "attention_denominators_clamped", help, stats.denominators.clamped);
}

fn prefix(registry: &mut Registry, prefixes: &PrefixIndex) {
    let (hits, misses) = prefixes.lookups();
    let lookups = counters("result", &[("hit", hits), ("miss", misses)]);
    registry.register("prefix_lookups", "Searches for a stored prefix of a prompt", lookups);
    gauge(registry, "prefixes", "Stored prefixes", prefixes.size().0 as u64);
}

fn store(registry: &mut Registry, stats: &StoreStats) {
    gauge(registry, "sessions", "Stored sessions", stats.sessions);
    gauge(registry, "session_versions", "Versions of sessions and responses whose states are stored", stats.versions);
    gauge(registry, "snapshots_in_memory", "States cached in memory", stats.ram_snapshots);
    let loads = counters("tier", &[("memory", stats.hits_memory), ("disk", stats.hits_disk)]);
    let help = "States of sessions and responses loaded, by where they were found";
    registry.register("snapshot_loads", help, loads);
    counter(registry, "session_commits", "Turns committed", stats.commits);
    let help = "Turns and moves of a head that were refused because another server had moved the head meanwhile";
    counter(registry, "sessions_commit_conflicts", help, stats.conflicts);
    counter(registry, "session_forks", "Sessions created by forking", stats.forks);
    counter(registry, "session_versions_dropped", "Versions evicted to make space", stats.dropped);
    counter(registry, "store_objects_collected", "Objects removed because nothing pointed to them", stats.collected);
    let help = "Most bytes of states on disk";
    registry.register_with_unit("disk_budget", help, Unit::Bytes, ConstGauge::new(stats.disk_budget));
    counter(registry, "store_refused", "Requests refused for lack of space or because of a quota", stats.refused);
}

/// Registers the latencies and failures of the index's or the object store's operations.
fn back_end(registry: &mut Registry, name: &str, called: &str, latencies: &[Latency]) {
    let help = format!("Time of the operations of the {called}");
    registry.register_with_unit(name, help, Unit::Seconds, Times(latencies.to_vec()));
    let failures: Vec<_> = latencies.iter().map(|latency| (latency.operation, latency.failures)).collect();
    let help = format!("Operations of the {called} that failed");
    registry.register(format!("{name}_failures"), help, counters("operation", &failures));
}

/// Returns the metrics of the process, under the names that all exporters use. `started` is in seconds since 1970.
pub(super) fn process(started: f64) -> Registry {
    let mut registry = Registry::with_prefix("process");
    let process = Process::read();
    let help = "Start time of the server in seconds since 1970";
    registry.register_with_unit("start_time", help, Unit::Seconds, ConstGauge::new(started));
    if let Some(bytes) = process.resident_bytes {
        registry.register_with_unit("resident_memory", "Resident memory", Unit::Bytes, ConstGauge::new(bytes));
    }
    if let Some(seconds) = process.cpu_seconds {
        registry.register_with_unit("cpu", "CPU time", Unit::Seconds, ConstCounter::new(seconds));
    }
    let counts = [
        ("open_fds", "Open file descriptors", process.open_fds),
        ("max_fds", "Most file descriptors that may be open", process.max_fds),
        ("threads", "Threads", process.threads),
    ];
    for (name, help, value) in counts {
        if let Some(value) = value {
            gauge(&mut registry, name, help, value);
        }
    }
    registry
}
