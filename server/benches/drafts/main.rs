//! The speed of one text with drafts against that without, in turn: code and a table that are continued, and prose.
//!
//! `cargo bench -p tidegate-server --bench drafts -- [--tokens N] [--rounds N] [--rows N] [--model FOLDER]`. A grammar allows the
//! next token of a given text alone, at each place, so that every model writes the same text, also one of random weights; the
//! sampler chooses it all the same. Without a folder, the models are the shipped one and one of 110 million random weights.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::json;
use tidegate_model::sampling::TokenSet;
use tidegate_model::{Decoder, DecoderConfig, ModelRunner, SamplingParams, WeightType, checkpoint};
use tidegate_server::Served;
use tidegate_server::checkpoint::{OpenOptions, open};
use tidegate_server::engine::{
    Constraint, ConstraintError, EngineHandle, EngineOptions, EngineThread, Event, EventStream, Finish, Grammar,
    Limits, Request, RequestParameters, TextRules, spawn,
};

/// Tokens of a text before those that are measured.
const PROMPT: usize = 600;

/// Allows one text.
#[derive(Clone, Debug)]
struct Given {
    tokens: Arc<[u32]>,
    at: usize,
}

impl Grammar for Given {
    fn start(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

impl Constraint for Given {
    fn mask(&mut self, allowed: &mut TokenSet) -> Result<(), ConstraintError> {
        allowed.clear();
        allowed.insert(self.tokens[self.at]);
        Ok(())
    }

    /// Known tokens would take no steps.
    fn forced(&self) -> Option<u32> {
        None
    }

    fn accept(&mut self, _: u32) -> Result<(), ConstraintError> {
        self.at += 1;
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.at == self.tokens.len()
    }
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A table of which some columns repeat themselves.
fn table() -> String {
    let cities = ["Rome", "Oslo", "Lima", "Cairo", "Quito"];
    let row = |i: usize| {
        let (city, price) = (cities[i * i % cities.len()], i * 7919 % 1000);
        format!("| 2026-11-{:02} | order {} | {city} | paid in full | {price}.00 EUR |\n", 1 + i % 28, 1000 + i)
    };
    (0..400).map(row).collect()
}

/// What the shipped model writes.
fn prose(served: &Served, tokens: usize) -> Vec<u32> {
    let prompt = served.tokenizer.encode("Once upon a time").expect("a text");
    let sampling = SamplingParams { seed: 1, ..SamplingParams::default() };
    let parameters =
        RequestParameters { prompt, max_tokens: tokens, ignore_eos: true, sampling, ..RequestParameters::default() };
    let request = Request::new(parameters, &served.limits).expect("a valid request");
    let mut stream = served.engine.submit(request).expect("the queue has room");
    let mut ids = Vec::new();
    while let Some(event) = stream.blocking_next() {
        if let Event::Delta(delta) = event {
            ids.extend(delta.token_ids);
        }
    }
    ids
}

fn engine(decoder: Decoder, served: &Served, draft_max: usize) -> (EngineHandle, EngineThread) {
    let pool = decoder.new_pool(8).expect("memory");
    let (vocabulary, eos) = (Arc::clone(served.tokenizer.vocabulary()), Arc::from([]));
    let rules = TextRules { vocabulary, eos, encode: Arc::new(|_: &str| Vec::new()) };
    let options = EngineOptions { draft_max, ..EngineOptions::default() };
    spawn(ModelRunner::new(decoder, pool), rules, options).expect("a running engine")
}

/// The decoder of 110 million parameters of `tidegate bench --shape 125m`.
fn shape(weights: WeightType) -> Decoder {
    let config = json!({"model_type": "rfa_gate", "vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 2048,
        "num_hidden_layers": 12, "num_attention_heads": 12, "head_dim": 64, "tie_word_embeddings": true, "proj_dim": 64});
    let config = DecoderConfig::from_json(&config.to_string()).expect("a valid config");
    Decoder::random(config, weights, 0).expect("a valid shape")
}

/// Tokens per second of each of `rows` texts at once, and how they ended.
fn measure(engine: &EngineHandle, vocab_size: usize, text: &[u32], rows: usize) -> (f64, Finish) {
    let (prompt, rest) = text.split_at(PROMPT);
    let limits = Limits { vocab_size, max_prompt_tokens: 100_000, max_tokens: 100_000, sources: None };
    let request = || {
        let grammar: Arc<dyn Grammar> = Arc::new(Given { tokens: rest.into(), at: 0 });
        let parameters = RequestParameters {
            prompt: prompt.to_vec(),
            max_tokens: rest.len(),
            grammar: Some(grammar),
            ..RequestParameters::default()
        };
        Request::new(parameters, &limits).expect("a valid request")
    };
    let streams = engine.submit_all((0..rows).map(|_| request()).collect()).expect("the queue has room");
    let end = |mut stream: EventStream| loop {
        match stream.blocking_next() {
            Some(Event::Finished(finish)) => return finish,
            Some(Event::Failed(failure)) => panic!("{failure}"),
            Some(_) => {}
            None => panic!("the engine has stopped"),
        }
    };
    let finish = streams.into_iter().map(end).max_by_key(|finish| finish.timings.decode).expect("a text");
    ((finish.completion_tokens - 1) as f64 / finish.timings.decode.as_secs_f64(), finish)
}

fn main() {
    let (mut tokens, mut rounds, mut rows, mut model) = (600, 7, 1, None);
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        let place = match flag.as_str() {
            "--tokens" => &mut tokens,
            "--rounds" => &mut rounds,
            "--rows" => &mut rows,
            "--model" => {
                model = Some(PathBuf::from(args.next().expect("a folder after the flag")));
                continue;
            }
            // Passed by Cargo.
            "--bench" => continue,
            _ => panic!("unknown flag {flag}"),
        };
        *place = args.next().and_then(|value| value.parse().ok()).expect("a number after the flag");
    }
    let folder = repository().join("weights/checkpoints/tidegate-tiny");
    let served = open(&folder, &OpenOptions::default()).expect("the shipped model").0;
    let code = std::fs::read_to_string(repository().join("server/src/engine/stats.rs")).expect("a source file");
    let length = PROMPT + tokens;
    let encode = |text: &str| -> Vec<u32> {
        let ids = served.tokenizer.encode(text).expect("a text");
        assert!(ids.len() >= length, "the text has {} tokens", ids.len());
        ids[..length].to_vec()
    };
    let texts = [("code", encode(&code)), ("table", encode(&table())), ("prose", prose(&served, length))];
    println!("tokens per second of {rows} text(s), median of {rounds} rounds (least to most)");
    let models = match &model {
        Some(given) => vec![(given.to_string_lossy(), Some(given))],
        None => vec![("shipped".into(), Some(&folder)), ("125m".into(), None)],
    };
    for (name, folder) in models {
        for weights in [WeightType::Bf16, WeightType::Q8_0] {
            let decoder = || match folder {
                Some(folder) => checkpoint::load_as(folder, weights).expect("a model"),
                None => shape(weights),
            };
            let vocab = decoder().config().vocab_size;
            let engines = [0, EngineOptions::default().draft_max].map(|most| engine(decoder(), &served, most));
            for (kind, text) in &texts {
                let (mut speeds, mut drafts) = ([const { Vec::new() }; 2], None);
                for round in 0..=rounds {
                    for ((engine, _), speeds) in engines.iter().zip(&mut speeds) {
                        let (speed, finish) = measure(engine, vocab, text, rows);
                        // The first round fills caches, and measures what drafts cost.
                        if round > 0 {
                            speeds.push(speed);
                            drafts = Some(finish.drafts);
                        }
                    }
                }
                let [plain, drafted] = speeds.map(|mut speeds| {
                    speeds.sort_by(f64::total_cmp);
                    (speeds[speeds.len() / 2], speeds[0], speeds[speeds.len() - 1])
                });
                let line = |(median, least, most): (f64, f64, f64)| format!("{median:.0} ({least:.0}-{most:.0})");
                let drafts = drafts.unwrap_or_default();
                println!(
                    "{name} {weights} {kind}: {} without, {} with drafts, {:.2}; {} of {} drafts accepted, {tokens} tokens",
                    line(plain),
                    line(drafted),
                    drafted.0 / plain.0,
                    drafts.accepted,
                    drafts.drafted,
                );
            }
        }
    }
}
