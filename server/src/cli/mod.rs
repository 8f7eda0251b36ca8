//! The command line: every flag, its variable in the environment, and what it means.

mod bench;
mod http;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use tidegate_server::checkpoint::DeviceChoice;

pub(crate) use bench::{BenchArgs, BenchOutput, MixerArg, ShapeArg, StateArg, word};
pub(crate) use http::HttpArgs;

/// Where the server listens when nothing else is said.
const DEFAULT_PORT: u16 = 8080;

/// What `--help` says below the commands.
const NOTES: &str = "\
Flags without a command are those of `serve`.

Exit codes: 0 when all went well, 1 after an error, 2 where the command line is wrong, 3 where the device that
--device asks for is not there or does not take the model.";

/// Serves text from language models whose memory has a constant size.
#[derive(Debug, Parser)]
#[command(name = "tidegate", version, after_help = NOTES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Cli {
    /// The command line of this process.
    pub(crate) fn read() -> Self {
        Self::parse_from(with_command(std::env::args_os()))
    }
}

/// Names `serve` where no command is named. Were its flags those of the program as well, a mistake in one of its
/// variables would keep the other commands from running.
fn with_command(args: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut args: Vec<OsString> = args.into_iter().collect();
    let named = args
        .get(1)
        .and_then(|first| first.to_str())
        .is_some_and(|first| !first.starts_with('-') || ["-h", "--help", "-V", "--version"].contains(&first));
    if !named {
        args.insert(args.len().min(1), "serve".into());
    }
    args
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serves a model over HTTP, in OpenAI's and others' formats, with sessions and a playground; the default.
    Serve(Box<ServeArgs>),
    /// Continues a prompt in the terminal.
    Generate(GenerateArgs),
    /// Measures tokens per second on this machine, and the share of what it gives at most.
    Bench(BenchArgs),
}

/// The flags of `serve`.
#[derive(Clone, Debug, Args)]
pub(crate) struct ServeArgs {
    /// Address or name to listen on; 0.0.0.0 for all.
    #[arg(long, env = "TIDEGATE_HOST", default_value = "127.0.0.1")]
    pub(crate) host: String,
    /// Port to listen on; 0 takes any that is free. An address `tcp://…`, which Kubernetes puts into TIDEGATE_PORT
    /// beside a service named tidegate, counts as not given.
    #[arg(long, env = "TIDEGATE_PORT", default_value_t = DEFAULT_PORT, value_parser = port)]
    pub(crate) port: u16,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Name that requests give as `model`; the checkpoint folder's own where absent.
    #[arg(long, env = "TIDEGATE_MODEL_NAME", value_name = "NAME")]
    pub(crate) model_name: Option<String>,
    /// Folder for what the server keeps between runs, made where it is missing; by default `tidegate` in the user's
    /// data folder ($XDG_DATA_HOME or ~/.local/share).
    #[arg(long, env = "TIDEGATE_DATA_DIR", value_name = "FOLDER")]
    pub(crate) data_dir: Option<PathBuf>,
    /// Requests that run at once, each with a state of its own in memory; `auto` is 64 on the CPU, and on a GPU as many as
    /// fit into nine tenths of its free memory, up to 1,024.
    #[arg(long, env = "TIDEGATE_SLOTS", value_name = "COUNT|auto", default_value = "auto", value_parser = slots)]
    pub(crate) slots: usize,
    /// Requests that may wait for a slot; beyond them the answer is 429.
    #[arg(long, env = "TIDEGATE_QUEUE", value_name = "COUNT", default_value_t = 256, value_parser = positive)]
    pub(crate) queue: usize,
    /// Largest `max_tokens` of a request.
    #[arg(long, env = "TIDEGATE_MAX_TOKENS_LIMIT", value_name = "TOKENS", default_value_t = 1_000_000, value_parser = positive)]
    pub(crate) max_tokens_limit: usize,
    /// Longest prompt; a source is never longer than its model reads.
    #[arg(long, env = "TIDEGATE_MAX_PROMPT_TOKENS", value_name = "TOKENS", default_value_t = 1_000_000, value_parser = positive)]
    pub(crate) max_prompt_tokens: usize,
    /// Longest request body.
    #[arg(long, env = "TIDEGATE_MAX_BODY_BYTES", value_name = "BYTES", default_value_t = 4 << 20, value_parser = positive)]
    pub(crate) max_body_bytes: usize,
    /// Time that a request may hold its slot while its client reads nothing.
    #[arg(long, env = "TIDEGATE_STALL_SECONDS", value_name = "SECONDS", default_value_t = 60)]
    pub(crate) stall_seconds: u64,
    /// Time that running requests have to end after SIGTERM or SIGINT; a second signal ends them at once.
    #[arg(long, env = "TIDEGATE_DRAIN_SECONDS", value_name = "SECONDS", default_value_t = 30)]
    pub(crate) drain_seconds: u64,
    /// Collector that OpenTelemetry traces are sent to by OTLP over HTTP, as `http://HOST:PORT`; where absent,
    /// OpenTelemetry's own variables name one (OTEL_EXPORTER_OTLP_ENDPOINT, …), or none.
    #[arg(long, env = "TIDEGATE_OTLP_ENDPOINT", value_name = "URL")]
    pub(crate) otlp_endpoint: Option<String>,
    #[command(flatten)]
    pub(crate) http: HttpArgs,
    #[command(flatten)]
    pub(crate) sessions: SessionArgs,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

/// The flags of `serve` that say how conversations are kept. Sizes are bytes, or a number with KiB, MiB, GiB or TiB.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Sessions")]
pub(crate) struct SessionArgs {
    /// When a turn is acknowledged: once it is on the disk, or once it is in memory (written within about a second).
    #[arg(long, env = "TIDEGATE_DURABILITY", value_enum, default_value_t = DurabilityArg::Turn)]
    pub(crate) durability: DurabilityArg,
    /// Object store for the snapshots, as `s3://BUCKET/FOLDER`, with its access in the variables of AWS's own tools
    /// (AWS_ACCESS_KEY_ID, AWS_ENDPOINT, …); the index stays in the data folder. Needs a server built with the
    /// feature `s3`.
    #[arg(long, env = "TIDEGATE_STORE", value_name = "URL")]
    pub(crate) store: Option<String>,
    /// Memory for states that were used last; the others are read from the disk when they are needed.
    #[arg(long, env = "TIDEGATE_RAM_BUDGET", value_name = "SIZE", default_value = "1GiB", value_parser = size)]
    pub(crate) ram_budget: u64,
    /// Room for snapshots on the disk. Where it is used up, old versions make room; then the answer is 507.
    #[arg(long, env = "TIDEGATE_DISK_BUDGET", value_name = "SIZE", default_value = "64GiB", value_parser = size)]
    pub(crate) disk_budget: u64,
    /// Room that one owner may use of it.
    #[arg(long, env = "TIDEGATE_OWNER_BUDGET", value_name = "SIZE", default_value = "64GiB", value_parser = size)]
    pub(crate) owner_budget: u64,
    /// Sessions that one owner may have.
    #[arg(long, env = "TIDEGATE_OWNER_SESSIONS", value_name = "COUNT", default_value_t = 100_000, value_parser = positive)]
    pub(crate) owner_sessions: usize,
    /// Versions that a session keeps to go back to, the current one included.
    #[arg(long, env = "TIDEGATE_KEEP_VERSIONS", value_name = "COUNT", default_value_t = 16, value_parser = positive)]
    pub(crate) keep_versions: usize,
    /// Days that a stored response is kept to go on from, at most: where room is short, the oldest go first.
    #[arg(long, env = "TIDEGATE_RESPONSE_DAYS", value_name = "DAYS", default_value_t = 30, value_parser = positive)]
    pub(crate) response_days: usize,
    /// Memory for beginnings of texts, so that clients who send the whole history each time have only the new part
    /// computed; 0 keeps none.
    #[arg(long, env = "TIDEGATE_PREFIX_BUDGET", value_name = "SIZE", default_value = "256MiB", value_parser = size)]
    pub(crate) prefix_budget: u64,
    /// Beginnings that one owner may have there.
    #[arg(long, env = "TIDEGATE_OWNER_PREFIXES", value_name = "COUNT", default_value_t = 64, value_parser = positive)]
    pub(crate) owner_prefixes: usize,
    /// File with at least 32 random bytes, as they are or as text: snapshots are signed with it, and states that
    /// clients keep are sealed. Servers that share it take each other's.
    #[arg(long, env = "TIDEGATE_SECRET_FILE", value_name = "FILE")]
    pub(crate) secret_file: Option<PathBuf>,
}

/// When a turn is acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DurabilityArg {
    /// Once it is on the disk.
    Turn,
    /// Once it is in memory.
    Memory,
}

/// The flags of `generate`.
#[derive(Clone, Debug, Args)]
pub(crate) struct GenerateArgs {
    /// The text to continue.
    pub(crate) prompt: String,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Tokens to generate at most.
    #[arg(long, short = 'n', value_name = "TOKENS", default_value_t = 256, value_parser = positive)]
    pub(crate) max_tokens: usize,
    /// 0 always takes the likeliest token; up to 2. The model's recommendation where absent, as with those below.
    #[arg(long, short)]
    pub(crate) temperature: Option<f32>,
    /// Draw from the likeliest tokens that together have this probability.
    #[arg(long)]
    pub(crate) top_p: Option<f32>,
    /// Draw from this many of the likeliest tokens; 0 for all.
    #[arg(long)]
    pub(crate) top_k: Option<usize>,
    /// Draw from tokens with at least this share of the likeliest one's probability.
    #[arg(long)]
    pub(crate) min_p: Option<f32>,
    /// Draw from the most typical tokens that together have this probability.
    #[arg(long)]
    pub(crate) typical_p: Option<f32>,
    /// Above 1 makes tokens that were seen less likely.
    #[arg(long)]
    pub(crate) repetition_penalty: Option<f32>,
    /// Taken from a token's logit for each time it was generated.
    #[arg(long, allow_negative_numbers = true)]
    pub(crate) frequency_penalty: Option<f32>,
    /// Taken from the logit of each token that was generated.
    #[arg(long, allow_negative_numbers = true)]
    pub(crate) presence_penalty: Option<f32>,
    /// The same seed gives the same text; random where absent.
    #[arg(long)]
    pub(crate) seed: Option<u64>,
    /// Ends the text; may be given up to 16 times.
    #[arg(long, value_name = "STRING")]
    pub(crate) stop: Vec<String>,
    /// Goes on past the end of a text.
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

/// Which model, and on what.
#[derive(Clone, Debug, Args)]
pub(crate) struct ModelArgs {
    /// Checkpoint folder (config.json, model.safetensors or model.gguf, tokenizer.json); the shipped one where absent.
    #[arg(long, env = "TIDEGATE_MODEL", value_name = "FOLDER")]
    pub(crate) model: Option<PathBuf>,
    /// Where the model computes: `cpu`; `cuda`, or `cuda:N` for another device than the first; `auto` for the first CUDA
    /// device, or the CPU where the build, the machine or the model is not made for one, which is warned of in a build
    /// with CUDA. Where `cuda` cannot be had the exit code is 3.
    #[arg(long, env = "TIDEGATE_DEVICE", value_name = "DEVICE", default_value_t)]
    pub(crate) device: DeviceChoice,
    /// Threads that compute; one for each core where absent.
    #[arg(long, env = "TIDEGATE_THREADS", value_name = "COUNT", value_parser = threads)]
    pub(crate) threads: Option<usize>,
    /// How conversations' states are held in memory: as f32, or as bf16, rounded by chance, which is faster where many
    /// are decoded at once. Sessions kept under one are not gone on with under the other.
    #[arg(long, env = "TIDEGATE_STATE", value_enum, default_value_t = StateArg::F32)]
    pub(crate) state: StateArg,
}

/// What is logged, to standard error.
#[derive(Clone, Debug, Args)]
pub(crate) struct LogArgs {
    /// Lines for people or JSON for machines.
    #[arg(long, env = "TIDEGATE_LOG_FORMAT", value_enum, default_value_t = LogFormat::Human)]
    pub(crate) log_format: LogFormat,
    /// What to log, as `level` or `target=level,…`: error, warn, info, debug, trace. By default `info` when serving
    /// and `warn` when generating.
    #[arg(long, env = "TIDEGATE_LOG", value_name = "FILTER")]
    pub(crate) log: Option<String>,
}

/// The shape of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// One line of text each.
    Human,
    /// One JSON object each.
    Json,
}

fn port(text: &str) -> Result<u16, String> {
    if text.starts_with("tcp://") {
        return Ok(DEFAULT_PORT);
    }
    text.parse().map_err(|_| "must be a number from 0 to 65535".into())
}

fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".into()),
        Ok(number) => Ok(number),
        Err(error) => Err(error.to_string()),
    }
}

/// A count, or 0 for `auto`.
fn slots(text: &str) -> Result<usize, String> {
    if text == "auto" {
        return Ok(0);
    }
    positive(text).map_err(|reason| format!("{reason} (or be `auto`)"))
}

fn threads(text: &str) -> Result<usize, String> {
    match positive(text)? {
        count if count > 1024 => Err("must be at most 1024".into()),
        count => Ok(count),
    }
}

/// A number of bytes, with or without a unit.
fn size(text: &str) -> Result<u64, String> {
    let units = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40), ("", 0)];
    let found = units.iter().find_map(|(unit, shift)| Some((text.strip_suffix(unit)?.trim(), *shift)));
    let bytes = found.and_then(|(number, shift)| number.parse::<u64>().ok()?.checked_mul(1 << shift));
    bytes.ok_or_else(|| "must be a whole number of bytes, or of KiB, MiB, GiB or TiB".into())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use clap::error::ErrorKind;

    use super::*;

    fn read(line: &[&str]) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(with_command(line.iter().map(OsString::from)))
    }

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn serve_is_the_default_and_takes_the_same_flags() {
        for (line, port) in [
            (&["tidegate"][..], 8080),
            (&["tidegate", "--port", "9000"], 9000),
            (&["tidegate", "--port=9001", "--slots", "2"], 9001),
            (&["tidegate", "serve", "--port", "9002"], 9002),
        ] {
            let command = read(line).unwrap().command;
            assert!(matches!(command, Command::Serve(args) if args.port == port), "{line:?}");
        }
        assert!(matches!(read(&["tidegate", "generate", "Once"]).unwrap().command, Command::Generate(_)));
        assert_eq!(read(&["tidegate", "--help"]).unwrap_err().kind(), ErrorKind::DisplayHelp);
        assert_eq!(read(&["tidegate", "--version"]).unwrap_err().kind(), ErrorKind::DisplayVersion);
        assert_eq!(read(&["tidegate", "sing"]).unwrap_err().kind(), ErrorKind::InvalidSubcommand);
    }

    #[test]
    fn a_port_is_a_number_and_kubernetes_own_word_is_none() {
        assert_eq!(port("0"), Ok(0));
        assert_eq!(port("tcp://10.0.0.7:8080"), Ok(DEFAULT_PORT));
        assert!(port("65536").is_err() && port("").is_err() && port("udp://10.0.0.7:8080").is_err());
    }

    #[test]
    fn every_flag_of_serve_has_a_variable_and_an_explanation() {
        let command = Cli::command();
        let serve = command.find_subcommand("serve").unwrap();
        for flag in serve.get_arguments().filter(|flag| flag.get_id() != "help") {
            let expected = format!("TIDEGATE_{}", flag.get_id().as_str().to_uppercase());
            assert_eq!(flag.get_env().and_then(|name| name.to_str()), Some(expected.as_str()));
            assert!(flag.get_help().is_some(), "{} is not explained", flag.get_id());
        }
    }

    #[test]
    fn counts_of_nothing_are_refused() {
        assert!(read(&["tidegate", "--slots", "0"]).is_err());
        assert!(read(&["tidegate", "serve", "--queue", "-1"]).is_err());
    }
}
