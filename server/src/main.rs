//! The `tidegate` command: `serve`, `generate` and `bench`.

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
use tidegate_server::session::StoreStats;
use tidegate_server::{AppState, Served, app, serve_with};
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{sleep, timeout};
use tracing::{debug, error, info, warn};
use tracing_subscriber::EnvFilter;

use cli::{Cli, Command, GenerateArgs, LogArgs, LogFormat, ModelArgs, ServeArgs};
use telemetry::Telemetry;

/// Minimum time for open connections to close after the last request, and the time an aborted engine has for its last step.
const CLOSING: Duration = Duration::from_secs(5);

/// The exit code where the device named by `--device` is missing or cannot run the model; `--help` documents it.
const NO_DEVICE: u8 = 3;

fn main() -> ExitCode {
    match run(Cli::read()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", chain(&error));
            if is_device_error(&error) { NO_DEVICE.into() } else { ExitCode::FAILURE }
        }
    }
}

fn is_device_error(error: &anyhow::Error) -> bool {
    // `OpenError::Device` is transparent, so the chain does not list its source.
    let opening = |cause: &(dyn Error + 'static)| matches!(cause.downcast_ref(), Some(OpenError::Device(_)));
    error.chain().any(|cause| cause.is::<DeviceError>() || opening(cause))
}

/// The error and its causes; causes whose text an outer error already includes are left out.
fn chain(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |mut text, cause| {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            let colon = if text.is_empty() { "" } else { ": " };
            text.extend([colon, &cause]);
        }
        text
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
        // If clap read TIDEGATE_MODEL here, it would conflict with `--shape`.
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
    let filter: EnvFilter = filter.parse().with_context(|| format!("--log: invalid filter `{filter}`"))?;
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false)
        .with_ansi(std::io::stderr().is_terminal())
        // They go to standard error, and writing there panics where it is a file on a full disk.
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
        ensure!(given, "--threads {threads}: the system allows {}", Threads::global().count());
    }
    // rayon packs weights and computes grammar masks beside a step; 0 means one thread per core.
    let threads = args.threads.unwrap_or(0);
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().context("cannot start the compute threads")
}

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
    debug!(
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
        // A dropped sender stops the server as well.
        let _ = stopped.await;
    }));
    debug!("bound to {address}; loading the model");

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
            info!("received {name} while loading the model, exiting");
            // The loading thread cannot be interrupted; nothing depends on it.
            std::process::exit(0);
        }
    };
    log_model(&served);
    let store = store::open(&args.sessions, data, &served.codec).await.context("cannot open the session store")?;
    log_sessions(&store.stats(), args.sessions.store.as_deref(), data);
    state.set_store(store);
    state.serve(served);
    let origin = format!("{scheme}://{address}");
    let local =
        if address.ip().is_unspecified() { format!("{scheme}://localhost:{}", address.port()) } else { origin.clone() };
    info!("listening on {origin}, playground {local}/, API reference {local}/docs");

    let mut engine = spawn_blocking(|| engine.join());
    let requested = tokio::select! {
        _ = &mut engine => None,
        name = signals.next() => Some(name),
    };
    state.drain();
    let mut left = Duration::ZERO;
    if let Some(name) = requested {
        info!("received {name}: finishing running requests, accepting no new ones");
        left = drain(&state, engine, &mut signals, Duration::from_secs(args.drain_seconds)).await;
    } else {
        error!("the engine stopped unexpectedly, shutting down");
    }
    // Turns that continue without a client are committed first. Slow readers have the remaining time to fetch their text.
    let closed = async {
        state.settle().await;
        // The server task is waiting for this, or has already ended.
        let _ = stop.send(());
        server.await
    };
    tokio::select! {
        ended = timeout(left.max(CLOSING), closed) => if let Ok(ended) = ended {
            ended??;
        } else {
            warn!("some requests did not finish in time; their sessions are unchanged");
        },
        name = signals.next() => warn!("received {name}: closing open connections"),
    }
    state.close().await;
    telemetry.end().await;
    ensure!(requested.is_some(), "the engine stopped unexpectedly");
    info!("shutdown complete");
    Ok(())
}

fn log_model(served: &Served) {
    info!(
        threads = Threads::global().count(),
        slots = served.engine.stats().slots,
        state_bytes = served.state_bytes,
        "model {} on {}",
        served.name,
        served.device
    );
    let sampling = &served.sampling;
    debug!(
        fingerprint = served.fingerprint,
        vocab_size = served.limits.vocab_size,
        eos = ?served.tokenizer.eos(),
        temperature = %sampling.temperature,
        top_p = %sampling.top_p,
        top_k = sampling.top_k,
        min_p = %sampling.min_p,
        repetition_penalty = %sampling.repetition_penalty,
        "model defaults"
    );
}

fn log_sessions(stats: &StoreStats, store: Option<&str>, data: Option<&Path>) {
    let folder = || data.map_or_else(|| "memory".into(), |folder| folder.display().to_string());
    let place = store.map_or_else(folder, str::to_owned);
    info!(sessions = stats.sessions, versions = stats.versions, disk_bytes = stats.disk_bytes, "sessions in {place}");
}

/// Waits up to `limit` for the engine to finish its requests, and returns the time that is left.
async fn drain(state: &AppState, mut engine: JoinHandle<()>, signals: &mut Signals, limit: Duration) -> Duration {
    let began = Instant::now();
    tokio::select! {
        _ = &mut engine => return limit.saturating_sub(began.elapsed()),
        () = sleep(limit) => warn!("some requests did not finish within {} s", limit.as_secs()),
        name = signals.next() => warn!("received {name} again: cancelling running requests"),
    }
    state.abort();
    // The engine takes at most one more step; a step that hangs cannot be interrupted from within the process.
    if timeout(CLOSING, engine).await.is_err() {
        error!("the engine hangs in a step, exiting without it");
        std::process::exit(1);
    }
    Duration::ZERO
}

/// The signals that shut the server down.
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
    let given = args.sampling;
    set(&mut sampling.temperature, given.temperature);
    set(&mut sampling.top_p, given.top_p);
    set(&mut sampling.min_p, given.min_p);
    set(&mut sampling.typical_p, given.typical_p);
    set(&mut sampling.repetition_penalty, given.repetition_penalty);
    set(&mut sampling.frequency_penalty, given.frequency_penalty);
    set(&mut sampling.presence_penalty, given.presence_penalty);
    sampling.top_k = given.top_k.unwrap_or(sampling.top_k);
    sampling.seed = given.seed.unwrap_or_else(|| rand::rng().random());
    let seed = sampling.seed;
    let parameters = RequestParameters {
        prompt: served.tokenizer.encode(&args.prompt)?,
        max_tokens: given.max_tokens,
        stop: given.stop,
        sampling,
        ignore_eos: given.ignore_eos,
        ..RequestParameters::default()
    };
    let events = served.engine.submit(Request::new(parameters, &served.limits)?)?;
    // A translation does not repeat its source.
    let before = if served.limits.sources.is_some() { "" } else { args.prompt.as_str() };
    let finish = match print(before, events) {
        // The reader closed the pipe on purpose, as `head` does.
        Err(error) if is_broken_pipe(&error) => return Ok(()),
        finish => finish?,
    };
    let (prompt, answer) = (finish.prompt_tokens, finish.completion_tokens);
    let first = finish.timings.prefill.as_secs_f64() * 1e3;
    // Prefill yields the first token.
    let rate = (answer - 1) as f64 / finish.timings.decode.as_secs_f64().max(1e-9);
    eprintln!(
        "prompt: {prompt} tokens in {first:.0} ms; generated: {answer} tokens at {rate:.1} tokens/s; seed {seed}"
    );
    Ok(())
}

/// Prints `before`, then the text as it arrives.
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
    bail!("the engine stopped")
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}
