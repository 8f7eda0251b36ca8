//! The speed of JSON by schema against that of free text, on the same engine with the shipped model, in turn.
//!
//! `cargo bench -p tidegate-server --bench grammar -- [--tokens N] [--rounds N]`. A text with log probabilities samples every
//! token of the same JSON: what its forced tokens save is the difference. If forced tokens cost nothing, JSON would be written
//! about as many times as fast as free text as it has tokens for each one that is sampled: the first estimate. In the second
//! estimate, forced tokens are read as fast as a prompt.

use std::path::Path;
use std::time::Instant;

use serde_json::json;
use tidegate_model::SamplingParams;
use tidegate_server::Served;
use tidegate_server::checkpoint::{OpenOptions, open};
use tidegate_server::engine::{Event, EventStream, Request, RequestParameters};
use tidegate_server::text::GrammarSpec;

/// Texts at once.
const ROWS: [usize; 3] = [1, 4, 16];

/// A schema as agents send it. Between two values, six tokens and more are forced.
fn schema() -> GrammarSpec {
    let text = json!({"type": "string", "maxLength": 20});
    let article = json!({"type": "object", "required": ["description", "quantity", "unit_price"],
        "additionalProperties": false, "properties": {"description": text, "quantity": {"type": "integer", "minimum": 1,
        "maximum": 99}, "unit_price": {"type": "integer", "minimum": 1, "maximum": 9999}}});
    GrammarSpec::JsonSchema(json!({"type": "object", "additionalProperties": false,
        "required": ["customer_name", "shipping_address", "articles", "payment_received"],
        "properties": {"customer_name": text, "shipping_address": {"type": "object", "additionalProperties": false,
        "required": ["street", "city", "country"], "properties": {"street": text, "city": text, "country": text}},
        "articles": {"type": "array", "items": article, "minItems": 3, "maxItems": 3},
        "payment_received": {"type": "boolean"}}}))
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Free,
    Json,
    Sampled,
    /// A prompt of that many tokens instead of a text.
    Prompt,
}

/// Tokens per second of `rows` texts at once.
fn measure(served: &Served, kind: Kind, rows: usize, round: usize, tokens: usize) -> f64 {
    let request = |row: usize| {
        let is_json = matches!(kind, Kind::Json | Kind::Sampled);
        let opening = served.tokenizer.encode("Once upon a time").expect("a text");
        let is_prompt = matches!(kind, Kind::Prompt);
        let seed = (1000 * round + row) as u64;
        let parameters = RequestParameters {
            prompt: if is_prompt { opening.into_iter().cycle().take(tokens).collect() } else { opening },
            max_tokens: if is_prompt { 1 } else { tokens },
            ignore_eos: !is_json,
            logprobs: matches!(kind, Kind::Sampled).then_some(0),
            grammar: if is_json { Some(served.grammars.compile(&schema()).expect("a valid schema")) } else { None },
            sampling: SamplingParams { seed, ..SamplingParams::default() },
            ..RequestParameters::default()
        };
        Request::new(parameters, &served.limits).expect("a valid request")
    };
    let requests = (0..rows).map(request).collect();
    let start = Instant::now();
    let streams = served.engine.submit_all(requests).expect("the queue has room");
    let count = |mut stream: EventStream| {
        loop {
            match stream.blocking_next() {
                Some(Event::Finished(_)) if matches!(kind, Kind::Prompt) => return tokens,
                Some(Event::Finished(finish)) => return finish.completion_tokens,
                Some(Event::Failed(failure)) => panic!("{failure}"),
                Some(_) => {}
                None => panic!("the engine has stopped"),
            }
        }
    };
    let written: usize = streams.into_iter().map(count).sum();
    written as f64 / start.elapsed().as_secs_f64()
}

fn main() {
    let (mut tokens, mut rounds) = (400, 9);
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        let place = match flag.as_str() {
            "--tokens" => &mut tokens,
            "--rounds" => &mut rounds,
            // Passed by Cargo.
            "--bench" => continue,
            _ => panic!("unknown flag {flag}"),
        };
        *place = args.next().and_then(|value| value.parse().ok()).expect("a number after the flag");
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../weights/checkpoints/tidegate-tiny");
    let served = open(&folder, &OpenOptions::default()).expect("the shipped model").0;
    println!("tokens per second, median of {rounds} rounds (least to most); JSON by schema over free text");
    for rows in ROWS {
        let mut speeds = [const { Vec::new() }; 4];
        let (mut written, mut forced) = (0, 0);
        for round in 0..=rounds {
            for (kind, speeds) in [Kind::Free, Kind::Json, Kind::Sampled, Kind::Prompt].into_iter().zip(&mut speeds) {
                let before = served.engine.stats();
                let speed = measure(&served, kind, rows, round, tokens);
                if matches!(kind, Kind::Json) {
                    let after = served.engine.stats();
                    written += after.generated_tokens - before.generated_tokens;
                    forced += after.forced_tokens - before.forced_tokens;
                }
                // The first round fills caches.
                if round > 0 {
                    speeds.push(speed);
                }
            }
        }
        let [free, json, sampled, prompt] = speeds.map(|mut speeds| {
            speeds.sort_by(f64::total_cmp);
            (speeds[speeds.len() / 2], speeds[0], speeds[speeds.len() - 1])
        });
        let line = |(median, least, most): (f64, f64, f64)| format!("{median:.0} ({least:.0}-{most:.0})");
        let (all, chosen) = (written as f64, (written - forced) as f64);
        println!(
            "{rows:2} rows: free {}, JSON {}, JSON with every token sampled {}, prompt {}; {:.2} and {:.2}; forced {forced} of \
             {written} tokens, estimates {:.2} and {:.2}",
            line(free),
            line(json),
            line(sampled),
            line(prompt),
            json.0 / free.0,
            sampled.0 / free.0,
            all / chosen,
            all / (chosen + forced as f64 * free.0 / prompt.0),
        );
    }
}
