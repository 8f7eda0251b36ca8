//! The `tidegate` command: `serve`, `generate`, `chat`, `bench`, `eval`, `pull`, `models` and `sessions`, and what the
//! command line prints about itself.

mod bench;
mod chat;
mod cli;
mod eval;
mod generate;
mod health;
mod http;
mod hub;
mod log;
mod models;
mod place;
mod sessions_command;
mod shipped;
mod store;
mod telemetry;

use std::error::Error;
use std::future::pending;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::fs::Mode;
use tidegate_model::Threads;
use tidegate_server::api::ModelOptions;
use tidegate_server::checkpoint::{self, CPU_SLOTS, DeviceChoice, DeviceError, Files, OpenError, OpenOptions};
use tidegate_server::engine::EngineOptions;
use tidegate_server::ram::SharedRam;
use tidegate_server::text::{HelperCommand, compile_grammars};
use tidegate_server::{AppState, app, serve_with};
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{sleep, timeout};
use tracing::{debug, error, info, warn};

use cli::{Cli, Command, DraftArg, LogArgs, LogFormat, ModelArgs, ModelsOutput, ServeArgs, Switch};
use models::{CheckpointLoader, Given, apart, sources};
use place::Place;
use telemetry::Telemetry;

/// Time to end turns after `--drain-seconds`, to close connections, and for the last step of an aborted engine.
const CLOSING: Duration = Duration::from_secs(5);

/// The exit code if the device named by `--device` is missing or cannot run the model; `--help` documents it.
const NO_DEVICE: u8 = 3;

fn main() -> ExitCode {
    match run(Cli::read()) {
        Ok(code) => code,
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

/// Returns the error and its causes, without causes whose text an outer error already includes.
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

fn run(cli: Cli) -> Result<ExitCode> {
    match cli.command {
        Command::Generate(args) => {
            log::start(&args.log, "warn")?;
            start_threads(&args.model)?;
            let (files, _) = models::find(&args.model)?;
            generate::generate(args, files)?;
        }
        Command::Eval(args) => {
            log::start(&args.log, "warn")?;
            start_threads(&args.model)?;
            printed(eval::eval(&args, || models::find(&args.model)))?;
        }
        Command::Chat(args) => {
            keep_files_private();
            log::start(&args.log, "warn")?;
            start_threads(&args.model)?;
            let (files, name) = models::find(&args.model)?;
            if !chat::run(&args, files, name)? {
                return Ok(ExitCode::FAILURE);
            }
        }
        Command::Serve(args) => {
            keep_files_private();
            start_server(&args)?;
        }
        Command::CompileGrammars => compile_grammars()?,
        Command::Health(args) => health::check(&args)?,
        Command::Completions { shell } => cli::print_completions(Cli::definition(), shell)?,
        Command::Man { command } => cli::print_man_page(Cli::definition(), command.as_deref())?,
        // If clap read TIDEGATE_MODEL here, it would conflict with `--shape`.
        Command::Bench(mut args) => {
            log::start(&LogArgs { log_format: LogFormat::Human, log: None }, "warn")?;
            args.model = args.model.as_deref().map(models::path).transpose()?;
            args.draft_model = args.draft_model.as_deref().map(models::path).transpose().context("--draft-model")?;
            bench::run(&args, || match std::env::var_os("TIDEGATE_MODEL") {
                Some(folder) if !folder.is_empty() => models::path(Path::new(&folder)),
                _ => shipped::folder(),
            })?;
        }
        Command::Pull(args) => {
            log::start(&args.log, "info")?;
            printed(place::pull(&args.model, args.rwkv_vocabulary.as_deref(), &mut std::io::stdout()))?;
        }
        Command::Models(args) => {
            let json = args.output == ModelsOutput::Json;
            printed(hub::print_models(&hub::Settings::read()?, json, &mut std::io::stdout().lock()))?;
        }
        Command::Sessions(args) => {
            keep_files_private();
            log::start(&LogArgs { log_format: LogFormat::Human, log: None }, "warn")?;
            if !sessions_command::run(&args)? {
                return Ok(ExitCode::FAILURE);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Ignores that the reader closed the pipe, which may be on purpose, as `head` does.
fn printed(result: Result<()>) -> Result<()> {
    result.or_else(|error| if generate::is_broken_pipe(&error) { Ok(()) } else { Err(error) })
}

/// Makes files private: conversations belong to their owners, so only this process's user can read what it creates. The
/// model cache is an exception, because other users may share it.
fn keep_files_private() {
    let before = rustix::process::umask(Mode::RWXG | Mode::RWXO);
    hub::share_cache(before);
}

fn start_threads(args: &ModelArgs) -> Result<()> {
    if let Some(threads) = args.threads {
        let given = Threads::configure(threads);
        ensure!(given, "--threads {threads}: the system allows {}", Threads::global().count());
    }
    // rayon packs weights and computes grammar masks during a step; 0 means one thread per core.
    let threads = args.threads.unwrap_or(0);
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().context("cannot start the compute threads")
}

fn start_server(args: &ServeArgs) -> Result<()> {
    log::start(&args.log, "info")?;
    start_threads(&args.model)?;
    let given = Given::new(args)?;
    let data = store::data_folder(&args.sessions)?;
    debug!(
        version = env!("CARGO_PKG_VERSION"),
        config = args.config.as_deref().map(|file| tracing::field::display(file.display())),
        host = args.host,
        port = args.port,
        models = ?given,
        any_model_name = ?args.any_model_name,
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
        log = args.log.log.as_deref().unwrap_or("info"),
        log_format = ?args.log.log_format,
        "settings"
    );
    http::log_settings(&args.http);
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(run_server(args, given, data.as_deref()))
}

async fn run_server(args: &ServeArgs, given: Given, data: Option<&Path>) -> Result<()> {
    let mut signals = Signals::new()?;
    let telemetry = Telemetry::start(args.otlp_endpoint.as_deref())?;
    let listener = TcpListener::bind((args.host.as_str(), args.port))
        .await
        .with_context(|| format!("cannot listen on {}:{}", args.host, args.port))?;
    let address = listener.local_addr()?;
    let state = AppState::new(http::api_options(args, address));
    let keys = http::set_api_keys(&state, &args.http, address)?;
    http::serve_admin(&args.http, &state)?;
    let options = http::serve_options(&args.http)?;
    let scheme = if options.tls.is_some() { "https" } else { "http" };
    let several = matches!(given, Given::Several(_));
    http::reload_on_sighup(state.clone(), options.tls.clone(), args.clone(), several)?;
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let server = tokio::spawn(serve_with(options, listener, app(state.clone()), async {
        // A dropped sender stops the server as well.
        let _ = stopped.await;
    }));
    debug!("bound to {address}; loading the model");

    let options = OpenOptions {
        name: None,
        vocabulary: None,
        any_name: args.any_model_name == Switch::On,
        backend: args.model.backend,
        device: args.model.device,
        slots: args.slots,
        state: args.model.state.into(),
        max_prompt_tokens: args.max_prompt_tokens,
        max_tokens: args.max_tokens_limit,
        engine: EngineOptions {
            queue: args.queue,
            stall_limit: Duration::from_secs(args.stall_seconds),
            draft_max: args.draft_max,
            ..EngineOptions::default()
        },
        prefix_bytes: args.sessions.prefix_budget as usize,
        prefixes_per_owner: args.sessions.owner_prefixes,
        secret: store::secret(&args.sessions)?,
        grammar_helper: Some(grammar_helper()?),
        lookup: args.draft == DraftArg::Ngram,
        draft_model: None,
    };
    let mut engine = tokio::select! {
        engine = load(&state, args, options, (given, keys, data)) => engine?,
        name = signals.next() => {
            info!("received {name} while loading the model, exiting");
            // The loading thread cannot be interrupted; nothing depends on it.
            std::process::exit(0);
        }
    };
    let origin = format!("{scheme}://{address}");
    let local =
        if address.ip().is_unspecified() { format!("{scheme}://localhost:{}", address.port()) } else { origin.clone() };
    info!("listening on {origin}, playground {local}/, API reference {local}/docs");

    let requested = tokio::select! {
        _ = &mut engine => None,
        name = signals.next() => Some(name),
    };
    state.drain();
    if several {
        let state = state.clone();
        engine = tokio::spawn(async move { state.engines_ended().await });
    }
    let mut left = Duration::ZERO;
    if let Some(name) = requested {
        info!("received {name}: finishing running requests, accepting no new ones");
        left = drain(&state, engine, &mut signals, Duration::from_secs(args.drain_seconds)).await;
    } else {
        error!("the engine stopped unexpectedly, shutting down");
    }
    // First, turns that continue without a client are committed. Slow readers then have the remaining time to fetch
    // their text.
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

/// Loads the models and serves them. With one model, the returned task ends when its engine does. With several, it
/// never ends, because the others go on if one engine stops.
async fn load(
    state: &AppState,
    args: &ServeArgs,
    options: OpenOptions,
    (given, keys, data): (Given, usize, Option<&Path>),
) -> Result<JoinHandle<()>> {
    let sources = match given {
        Given::One { place, name, draft } => {
            let find = || Ok((place.find()?, draft.map(Place::find).transpose().context("--draft-model")?));
            let (Files { path, vocabulary }, draft_model) = apart(find).await?;
            let options = OpenOptions { name, vocabulary, draft_model, ..options };
            let (served, engine) = spawn_blocking(move || checkpoint::open(&path, &options)).await??;
            log::served(&served);
            let store = store::open(&args.sessions, keys, data, &served).await;
            state.set_store(store.context("cannot open the session store")?);
            state.serve(served);
            return Ok(spawn_blocking(|| engine.join()));
        }
        Given::Several(models) => apart(|| sources(models)).await?,
    };
    let (backend, device) = (options.backend, options.device);
    if !matches!(device, DeviceChoice::Auto | DeviceChoice::Cpu) {
        // A missing device has its own exit code.
        spawn_blocking(move || backend.check(device)).await??;
    }
    let ram = SharedRam::new(args.sessions.ram_budget, sources.len(), args.sessions.prefix_budget);
    let prefix_bytes = usize::try_from(ram.prefixes).unwrap_or(usize::MAX);
    // Otherwise, each model would take all of a GPU's memory.
    let slots = if options.slots == 0 { CPU_SLOTS } else { options.slots };
    let loader = CheckpointLoader {
        args: args.clone(),
        options: OpenOptions { slots, prefix_bytes, ..options },
        keys,
        models: sources.len(),
        data: data.map(Path::to_owned),
    };
    info!(models = sources.len(), models_mib = ram.models >> 20, "the first of several models is {}", sources[0].name);
    let shared = ModelOptions { budget: ram.models, any_name: args.any_model_name == Switch::On };
    state.serve_models(sources, shared, Arc::new(loader)).await.map_err(anyhow::Error::msg)?;
    Ok(tokio::spawn(pending()))
}

/// Returns the command of the grammar helper, which is this program.
fn grammar_helper() -> Result<HelperCommand> {
    // On Linux, this is the running program even if its file has been replaced.
    let own = Path::new("/proc/self/exe");
    let program = if own.exists() { own.into() } else { std::env::current_exe()? };
    Ok(HelperCommand { program: program.into(), args: vec!["compile-grammars".into()] })
}

/// Waits up to `limit` for the engine to finish its requests, and returns the time that is left.
async fn drain(state: &AppState, mut engine: JoinHandle<()>, signals: &mut Signals, limit: Duration) -> Duration {
    let began = Instant::now();
    tokio::select! {
        _ = &mut engine => return limit.saturating_sub(began.elapsed()),
        () = sleep(limit) => {
            warn!("some requests did not finish within {} s: ending them", limit.as_secs());
            state.finish_turns();
            tokio::select! {
                _ = &mut engine => return Duration::ZERO,
                () = sleep(CLOSING) => warn!("some turns could not be ended in time; their sessions are unchanged"),
                name = signals.next() => warn!("received {name} again: cancelling running requests"),
            }
        }
        name = signals.next() => warn!("received {name} again: cancelling running requests"),
    }
    state.abort();
    // The engine takes at most one more step. A step that hangs cannot be interrupted from within the process.
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
