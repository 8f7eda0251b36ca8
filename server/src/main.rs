//! The `tidegate` command: serving, generating in the terminal, measuring.

mod bench;
mod cli;
mod http;
mod store;
mod telemetry;

use std::error::Error;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rand::Rng;
use tidegate_model::Threads;
use tidegate_server::checkpoint::{self, DeviceError, OpenError, OpenOptions};
use tidegate_server::engine::{EngineOptions, Event, EventStream, Finish, Request, RequestParameters};
use tidegate_server::{AppState, Served, app, serve_with};
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{sleep, timeout};
use tracing::{error, info, warn};
use tracing_subscriber::EnvFilter;

use cli::{Cli, Command, GenerateArgs, LogArgs, LogFormat, ModelArgs, ServeArgs};
use telemetry::Telemetry;

/// Least time that open connections have to close once all texts are finished, and all that an aborted engine has for
/// its last step.
const CLOSING: Duration = Duration::from_secs(5);

/// The exit code where the device that was asked for does not serve; `--help` tells it.
const NO_DEVICE: u8 = 3;

fn main() -> ExitCode {
    match run(Cli::read()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", words(&error));
            if is_of_the_device(&error) { NO_DEVICE.into() } else { ExitCode::FAILURE }
        }
    }
}

fn is_of_the_device(error: &anyhow::Error) -> bool {
    // The transparent error hides the one that it holds.
    let opening = |cause: &(dyn Error + 'static)| matches!(cause.downcast_ref(), Some(OpenError::Device(_)));
    error.chain().any(|cause| cause.is::<DeviceError>() || opening(cause))
}

/// An error and its causes, without those whose words it has already.
fn words(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |mut words, cause| {
        let cause = cause.to_string();
        if !words.contains(&cause) {
            let colon = if words.is_empty() { "" } else { ": " };
            words.extend([colon, &cause]);
        }
        words
    })
}

fn run(cli: Cli) -> Result<()> {
    match cli.command {
        Command::Generate(args) => {
            start_log(&args.log, "warn")?;
            start_threads(&args.model)?;
            generate(args)
        }
        Command::Serve(args) => start_server(&args),
        // A variable that were clap's would stand against `--shape`.
        Command::Bench(args) => {
            start_log(&LogArgs { log_format: LogFormat::Human, log: None }, "warn")?;
            bench::run(&args, || match std::env::var_os("TIDEGATE_MODEL") {
                Some(folder) if !folder.is_empty() => Ok(folder.into()),
                _ => Ok(checkpoint::locate()?),
            })
        }
    }
}

fn start_log(args: &LogArgs, default: &str) -> Result<()> {
    let filter = args.log.as_deref().unwrap_or(default);
    let filter: EnvFilter = filter.parse().with_context(|| format!("--log: `{filter}` is no filter"))?;
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false)
        .with_ansi(std::io::stderr().is_terminal())
        // It would be said on standard error, and where that is a file on a full disk, saying it panics.
        .log_internal_errors(false);
    match args.log_format {
        LogFormat::Human => log.init(),
        LogFormat::Json => log.json().flatten_event(true).with_span_list(false).init(),
    }
    Ok(())
}

fn start_threads(args: &ModelArgs) -> Result<()> {
    if let Some(threads) = args.threads {
        let given = Threads::configure(threads);
        anyhow::ensure!(given, "--threads {threads}: the system gives {}", Threads::global().count());
    }
    // Those that pack weights, and make the masks of grammars beside a step; 0 is one for each core.
    let threads = args.threads.unwrap_or(0);
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().context("the compute threads did not start")
}

/// The folder of the model to load.
fn model_folder(args: &ModelArgs) -> Result<PathBuf> {
    Ok(match &args.model {
        Some(folder) => folder.clone(),
        None => checkpoint::locate()?,
    })
}

fn start_server(args: &ServeArgs) -> Result<()> {
    start_log(&args.log, "info")?;
    start_threads(&args.model)?;
    let folder = model_folder(&args.model)?;
    let data = store::data_folder(args)?;
    info!(
        version = env!("CARGO_PKG_VERSION"),
        host = args.host,
        port = args.port,
        model = %folder.display(),
        data_dir = data.as_deref().map(|folder| tracing::field::display(folder.display())),
        queue = args.queue,
        device = %args.model.device,
        threads = Threads::global().count(),
        state = ?args.model.state,
        max_tokens_limit = args.max_tokens_limit,
        max_prompt_tokens = args.max_prompt_tokens,
        max_body_bytes = args.max_body_bytes,
        stall_seconds = args.stall_seconds,
        drain_seconds = args.drain_seconds,
        api_keys_file = args.http.api_keys_file.as_deref().map(|file| tracing::field::display(file.display())),
        api_keys_given = args.http.api_key.len(),
        cors_origins = ?args.http.cors_origin,
        tls_cert = args.http.tls_cert.as_deref().map(|file| tracing::field::display(file.display())),
        max_connections = args.http.max_connections,
        body_seconds = args.http.body_seconds,
        max_seconds = args.http.max_seconds,
        log = args.log.log.as_deref().unwrap_or("info"),
        log_format = ?args.log.log_format,
        "settings"
    );
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(run_server(
        args,
        folder,
        data.as_deref(),
    ))
}

async fn run_server(args: &ServeArgs, folder: PathBuf, data: Option<&Path>) -> Result<()> {
    let mut signals = Signals::new()?;
    let telemetry = Telemetry::start(args.otlp_endpoint.as_deref())?;
    let listener = TcpListener::bind((args.host.as_str(), args.port))
        .await
        .with_context(|| format!("cannot listen on {}:{}", args.host, args.port))?;
    let address = listener.local_addr()?;
    let state = AppState::new(http::api_options(args));
    http::set_api_keys(&state, &args.http, address)?;
    let options = http::serve_options(&args.http)?;
    let scheme = if options.tls.is_some() { "https" } else { "http" };
    http::reload_on_sighup(state.clone(), options.tls.clone(), args.http.clone())?;
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let server = tokio::spawn(serve_with(options, listener, app(state.clone()), async {
        // A sender that is gone means the same.
        let _ = stopped.await;
    }));
    info!("listening on {scheme}://{address}, loading the model");

    let options = OpenOptions {
        name: args.model_name.clone(),
        device: args.model.device,
        slots: args.slots,
        state: args.model.state.into(),
        max_prompt_tokens: args.max_prompt_tokens,
        max_tokens: args.max_tokens_limit,
        engine: EngineOptions {
            queue: args.queue,
            stall_limit: Duration::from_secs(args.stall_seconds),
            ..EngineOptions::default()
        },
        prefix_bytes: args.sessions.prefix_budget as usize,
        prefixes_per_owner: args.sessions.owner_prefixes,
        secret: store::secret(&args.sessions)?,
    };
    let loading = spawn_blocking(move || checkpoint::open(&folder, &options));
    let (served, engine) = tokio::select! {
        loaded = loading => loaded??,
        name = signals.next() => {
            info!("{name} while loading, the server ends");
            // The loading thread cannot be interrupted, and nothing depends on it.
            std::process::exit(0);
        }
    };
    let store = store::open(&args.sessions, data, &served.codec).await.context("the sessions' store")?;
    let stats = store.stats();
    info!(sessions = stats.sessions, versions = stats.versions, disk_bytes = stats.disk_bytes, "sessions are open");
    state.keep(store);
    ready(state.serve(served));

    let mut engine = spawn_blocking(|| engine.join());
    let asked = tokio::select! {
        _ = &mut engine => None,
        name = signals.next() => Some(name),
    };
    state.drain();
    let mut left = Duration::ZERO;
    if let Some(name) = asked {
        info!("{name}: no more requests are taken, those that run are finished");
        left = drain(&state, engine, &mut signals, Duration::from_secs(args.drain_seconds)).await;
    } else {
        error!("the engine ended although nobody had asked it to, and so does the server");
    }
    // Turns without a client have ended with the engine's last, and what they made is written; slow readers have what
    // is left of the time to fetch the rest of their texts.
    let closed = async {
        state.settle().await;
        // The other end waits for it, or has ended.
        let _ = stop.send(());
        server.await
    };
    tokio::select! {
        ended = timeout(left.max(CLOSING), closed) => if let Ok(ended) = ended {
            ended??;
        } else {
            warn!("some runs or connections did not end in time; their sessions are as they were before");
        },
        name = signals.next() => warn!("{name}: connections that are still open are cut off"),
    }
    state.close().await;
    telemetry.end().await;
    ensure!(asked.is_some(), "the engine ended although nobody had asked it to");
    info!("the server ends");
    Ok(())
}

fn ready(served: &Served) {
    let sampling = &served.sampling;
    info!(
        model = served.name,
        fingerprint = served.fingerprint,
        device = served.device,
        slots = served.engine.stats().slots,
        vocab_size = served.limits.vocab_size,
        eos = ?served.tokenizer.eos(),
        temperature = %sampling.temperature,
        top_p = %sampling.top_p,
        top_k = sampling.top_k,
        min_p = %sampling.min_p,
        repetition_penalty = %sampling.repetition_penalty,
        "ready; the sampling shown holds where a request says nothing"
    );
}

/// Waits for the engine to finish what it has taken, for `limit` at most; what is left of that time.
async fn drain(state: &AppState, mut engine: JoinHandle<()>, signals: &mut Signals, limit: Duration) -> Duration {
    let began = Instant::now();
    tokio::select! {
        _ = &mut engine => return limit.saturating_sub(began.elapsed()),
        () = sleep(limit) => warn!("some requests did not end in {} s", limit.as_secs()),
        name = signals.next() => warn!("{name} again: what still runs is cut off"),
    }
    state.abort();
    // One more step at most; a step that never ends cannot be interrupted from within the process.
    if timeout(CLOSING, engine).await.is_err() {
        error!("the engine is stuck in a step, the process ends without it");
        std::process::exit(1);
    }
    Duration::ZERO
}

/// The signals that end the server.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> Result<Self> {
        let listen = |kind| signal(kind).context("cannot listen for signals");
        Ok(Self { terminate: listen(SignalKind::terminate())?, interrupt: listen(SignalKind::interrupt())? })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

fn generate(args: GenerateArgs) -> Result<()> {
    let folder = model_folder(&args.model)?;
    let (device, state) = (args.model.device, args.model.state.into());
    let options = OpenOptions { device, slots: 1, state, ..OpenOptions::default() };
    let (served, _engine) = checkpoint::open(&folder, &options)?;
    let mut sampling = served.sampling.clone();
    let set = |target: &mut f32, value: Option<f32>| *target = value.unwrap_or(*target);
    set(&mut sampling.temperature, args.temperature);
    set(&mut sampling.top_p, args.top_p);
    set(&mut sampling.min_p, args.min_p);
    set(&mut sampling.typical_p, args.typical_p);
    set(&mut sampling.repetition_penalty, args.repetition_penalty);
    set(&mut sampling.frequency_penalty, args.frequency_penalty);
    set(&mut sampling.presence_penalty, args.presence_penalty);
    sampling.top_k = args.top_k.unwrap_or(sampling.top_k);
    sampling.seed = args.seed.unwrap_or_else(|| rand::rng().random());
    let seed = sampling.seed;
    let parameters = RequestParameters {
        prompt: served.tokenizer.encode(&args.prompt)?,
        max_tokens: args.max_tokens,
        stop: args.stop,
        sampling,
        ignore_eos: args.ignore_eos,
        ..RequestParameters::default()
    };
    let events = served.engine.submit(Request::new(parameters, &served.limits)?)?;
    // A translation does not go on with its source.
    let before = if served.limits.sources.is_some() { "" } else { args.prompt.as_str() };
    let finish = match print(before, events) {
        // Who closed the pipe has seen enough.
        Err(error) if is_broken_pipe(&error) => return Ok(()),
        finish => finish?,
    };
    let (prompt, answer) = (finish.prompt_tokens, finish.completion_tokens);
    let first = finish.timings.prefill.as_secs_f64() * 1e3;
    // The first token comes out of the prompt's reading.
    let rate = (answer - 1) as f64 / finish.timings.decode.as_secs_f64().max(1e-9);
    eprintln!("{prompt} tokens read in {first:.0} ms, {answer} generated at {rate:.1} tokens/s, seed {seed}");
    Ok(())
}

/// Prints what comes before the text, and the text as it comes.
fn print(before: &str, mut events: EventStream) -> Result<Finish> {
    let mut out = std::io::stdout().lock();
    write!(out, "{before}")?;
    out.flush()?;
    while let Some(event) = events.blocking_next() {
        match event {
            Event::Read(_) | Event::PromptLogprobs(_) => {}
            Event::Delta(delta) => {
                write!(out, "{}", delta.text)?;
                out.flush()?;
            }
            Event::Finished(finish) => {
                writeln!(out)?;
                return Ok(finish);
            }
            Event::Failed(failure) => bail!(failure),
        }
    }
    bail!("the engine has stopped")
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}
