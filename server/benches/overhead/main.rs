//! The cost of HTTP: tokens per second of 32 streams through HTTP and server-sent events over loopback, compared with
//! the engine alone, alternating, with the same requests on the same engine in the same process.
//!
//! `cargo bench -p tidegate-server --bench overhead -- [--model FOLDER] [--streams N] [--tokens N] [--rounds N]`; without a
//! folder, of the shipped model. The clients run on the same cores, so the figure includes their cost. Neither side keeps
//! prefixes.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::json;
use tidegate_model::SamplingParams;
use tidegate_server::checkpoint::{OpenOptions, open};
use tidegate_server::engine::{EngineHandle, Event, Request, RequestParameters};
use tidegate_server::{ApiOptions, AppState, app, serve};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// The prompt of every stream.
const PROMPT: &str = "Once upon a time";

/// Lowest acceptable share of the engine's speed.
const TARGET: f64 = 0.95;

struct Size {
    model: PathBuf,
    streams: usize,
    tokens: usize,
    rounds: usize,
}

impl Size {
    fn read() -> Self {
        let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../weights/checkpoints/tidegate-tiny").into();
        let mut size = Self { model, streams: 32, tokens: 256, rounds: 15 };
        let mut args = std::env::args().skip(1);
        while let Some(flag) = args.next() {
            let place = match flag.as_str() {
                "--model" => {
                    size.model = args.next().expect("a folder after the flag").into();
                    continue;
                }
                "--streams" => &mut size.streams,
                "--tokens" => &mut size.tokens,
                "--rounds" => &mut size.rounds,
                // Passed by Cargo.
                "--bench" => continue,
                _ => panic!("unknown flag {flag}"),
            };
            *place = args.next().and_then(|value| value.parse().ok()).expect("a number after the flag");
        }
        size
    }
}

/// All streams on the engine alone; returns the number of tokens.
async fn engine_alone(engine: &EngineHandle, requests: Vec<Request>) -> usize {
    let mut streams = JoinSet::new();
    for request in requests {
        let mut events = engine.submit(request).expect("the queue has room");
        streams.spawn(async move {
            while let Some(event) = events.next().await {
                match event {
                    Event::Finished(finish) => return finish.completion_tokens,
                    Event::Failed(failure) => panic!("{failure}"),
                    _ => {}
                }
            }
            panic!("the engine has stopped")
        });
    }
    streams.join_all().await.into_iter().sum()
}

/// All streams through HTTP, each on its own open connection.
async fn through_http(connections: Vec<TcpStream>, tokens: usize) -> (usize, Vec<TcpStream>) {
    let mut streams = JoinSet::new();
    for (seed, connection) in connections.into_iter().enumerate() {
        streams.spawn(stream(connection, tokens, seed));
    }
    let ended = streams.join_all().await;
    (ended.iter().map(|(tokens, _)| tokens).sum(), ended.into_iter().map(|(_, connection)| connection).collect())
}

async fn stream(mut connection: TcpStream, tokens: usize, seed: usize) -> (usize, TcpStream) {
    let body = json!({"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": true, "seed": seed, "stream": true});
    let body = body.to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    connection.write_all((head + &body).as_bytes()).await.expect("the server reads");
    let (mut seen, mut whole) = (0, Vec::with_capacity(tokens * 512));
    // The end of a chunked body.
    while !whole[seen..].ends_with(b"\r\n0\r\n\r\n") {
        seen = whole.len().saturating_sub(16);
        let count = connection.read_buf(&mut whole).await.expect("the server writes");
        assert!(count > 0, "the stream ended early");
    }
    let text = String::from_utf8_lossy(&whole);
    assert!(text.starts_with("HTTP/1.1 200") && text.contains("data: [DONE]"), "{text}");
    (tokens, connection)
}

fn requests(
    size: &Size,
    prompt: &[u32],
    sampling: &SamplingParams,
    limits: &tidegate_server::engine::Limits,
) -> Vec<Request> {
    let request = |seed| {
        let sampling = SamplingParams { seed, ..sampling.clone() };
        let (prompt, max_tokens) = (prompt.to_vec(), size.tokens);
        let parameters = RequestParameters { prompt, max_tokens, sampling, ignore_eos: true, ..Default::default() };
        Request::new(parameters, limits).expect("the request is within the limits")
    };
    (0..size.streams as u64).map(request).collect()
}

/// Median, minimum and maximum.
fn spread(mut values: Vec<f64>) -> (f64, f64, f64) {
    values.sort_unstable_by(f64::total_cmp);
    (values[values.len() / 2], values[0], values[values.len() - 1])
}

/// CPU seconds of this process so far, which other programs do not affect. 0 on systems without `/proc`.
fn processor() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace().skip(11).take(2);
    fields.filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}

fn load() -> String {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split(' ').next().unwrap_or("unknown").to_owned()
}

#[tokio::main]
async fn main() {
    let size = Size::read();
    let options = OpenOptions { slots: size.streams, prefix_bytes: 0, ..OpenOptions::default() };
    let (served, _thread) = open(&size.model, &options).expect("the checkpoint can be served");
    let (engine, limits, sampling) = (served.engine.clone(), served.limits, served.sampling.clone());
    let prompt = served.tokenizer.encode(PROMPT).expect("the prompt can be encoded");
    let state = AppState::new(ApiOptions::default());
    state.serve(served);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(serve(listener, app(state), std::future::pending()));
    let mut connections = Vec::new();
    for _ in 0..size.streams {
        let connection = TcpStream::connect(address).await.expect("the server listens");
        connection.set_nodelay(true).expect("a socket");
        connections.push(connection);
    }

    let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64();
    let (mut alone, mut http, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    let (mut engine_processor, mut http_processor) = (Vec::new(), Vec::new());
    println!("{} streams x {} tokens, {} rounds; load {}", size.streams, size.tokens, size.rounds, load());
    // The first round warms up.
    for round in 0..=size.rounds {
        let began = processor();
        let requests = requests(&size, &prompt, &sampling, &limits);
        let clock = Instant::now();
        let tokens = engine_alone(&engine, requests).await;
        let engine_rate = rate(tokens, clock.elapsed());
        let between = processor();
        let clock = Instant::now();
        let (tokens, open) = through_http(connections, size.tokens).await;
        let http_rate = rate(tokens, clock.elapsed());
        connections = open;
        if round > 0 {
            println!(
                "round {round}: engine {engine_rate:.0}, HTTP {http_rate:.0} tokens/s, {:.3}",
                http_rate / engine_rate
            );
            alone.push(engine_rate);
            http.push(http_rate);
            ratios.push(http_rate / engine_rate);
            engine_processor.push((between - began) * 1e6 / tokens as f64);
            http_processor.push((processor() - between) * 1e6 / tokens as f64);
        }
    }
    println!("\n| | median | min | max |\n| --- | --- | --- | --- |");
    for (name, values, digits) in [
        ("engine alone, tokens/s", alone, 0),
        ("HTTP and SSE, tokens/s", http, 0),
        ("ratio", ratios.clone(), 3),
        ("engine alone, CPU time per token, µs", engine_processor, 0),
        ("HTTP, SSE and clients, CPU time per token, µs", http_processor, 0),
    ] {
        let (median, least, most) = spread(values);
        println!("| {name} | {median:.digits$} | {least:.digits$} | {most:.digits$} |");
    }
    let median = spread(ratios).0;
    let verdict = if median >= TARGET { "reached" } else { "missed" };
    println!("\nload {}; the target of {TARGET} is {verdict}", load());
}
