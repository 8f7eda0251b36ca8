//! The command line: every flag, its environment variable, and its help.

mod bench;
mod http;
mod parse;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use tidegate_server::checkpoint::DeviceChoice;

pub(crate) use bench::{BenchArgs, BenchOutput, MixerArg, ShapeArg, StateArg, word};
pub(crate) use http::HttpArgs;
use parse::{DEFAULT_PORT, port, positive, size, slots, within};

const NOTES: &str = "\
Without a command, flags are those of `serve`: `tidegate --port 9000`.

Exit codes: 0 success, 1 error, 2 wrong command line,
3 the device named by --device is missing or cannot run the model.";

const ENVIRONMENT: &str = "\
Every flag has an environment variable: --max-body-bytes is TIDEGATE_MAX_BODY_BYTES.
Sizes are bytes, or a number followed by KiB, MiB, GiB or TiB.";

/// Serves language models whose memory of a conversation has a constant size.
#[derive(Debug, Parser)]
#[command(name = "tidegate", version, after_help = NOTES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Cli {
    /// Parses the arguments of this process; prints the help or an error and exits where there is nothing to run.
    pub(crate) fn read() -> Self {
        let matches = Self::definition().get_matches_from(with_command(std::env::args_os()));
        Self::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
    }

    /// The commands, without a variable's name beside every flag: `ENVIRONMENT` gives the rule.
    fn definition() -> clap::Command {
        Self::command().mut_subcommands(|command| command.mut_args(|arg| arg.hide_env(true)))
    }
}

/// Inserts `serve` where no command is named. If the flags of `serve` belonged to the program as well, a wrong variable of
/// one of them would stop the other commands.
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

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve a model over HTTP (the default)
    #[command(after_help = ENVIRONMENT)]
    Serve(Box<ServeArgs>),
    /// Continue a prompt in the terminal
    Generate(GenerateArgs),
    /// Measure tokens per second on this machine
    Bench(BenchArgs),
}

/// The flags of `serve`.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Serving")]
pub(crate) struct ServeArgs {
    /// Address to listen on; 0.0.0.0 for all interfaces
    #[arg(long, env = "TIDEGATE_HOST", default_value = "127.0.0.1")]
    pub(crate) host: String,
    /// Port to listen on; 0 for any free port
    #[arg(long, env = "TIDEGATE_PORT", default_value_t = DEFAULT_PORT, value_parser = port)]
    pub(crate) port: u16,
    /// Requests that run at once; auto: 64 on the CPU, as many as fit on a GPU (at most 16,384)
    #[arg(long, env = "TIDEGATE_SLOTS", value_name = "COUNT|auto", default_value = "auto", value_parser = slots)]
    pub(crate) slots: usize,
    /// Requests that may wait for a slot; further ones get 429
    #[arg(long, env = "TIDEGATE_QUEUE", value_name = "COUNT", default_value_t = 256, value_parser = positive)]
    pub(crate) queue: usize,
    /// Seconds a request keeps its slot while its client reads nothing
    #[arg(long, env = "TIDEGATE_STALL_SECONDS", value_name = "SECONDS", default_value_t = 60)]
    pub(crate) stall_seconds: u64,
    /// Seconds to finish running requests after SIGTERM; a second signal ends them at once
    #[arg(long, env = "TIDEGATE_DRAIN_SECONDS", value_name = "SECONDS", default_value_t = 30)]
    pub(crate) drain_seconds: u64,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Model name in the API [default: the folder's name]
    #[arg(long, env = "TIDEGATE_MODEL_NAME", value_name = "NAME", help_heading = "Model")]
    pub(crate) model_name: Option<String>,
    #[command(flatten)]
    pub(crate) sessions: SessionArgs,
    /// Largest max_tokens of a request
    #[arg(long, env = "TIDEGATE_MAX_TOKENS_LIMIT", value_name = "TOKENS", default_value_t = 1_000_000, value_parser = positive, help_heading = "Limits")]
    pub(crate) max_tokens_limit: usize,
    /// Longest prompt; an encoder-decoder's own limit applies too
    #[arg(long, env = "TIDEGATE_MAX_PROMPT_TOKENS", value_name = "TOKENS", default_value_t = 1_000_000, value_parser = positive, help_heading = "Limits")]
    pub(crate) max_prompt_tokens: usize,
    /// Largest request body
    #[arg(long, env = "TIDEGATE_MAX_BODY_BYTES", value_name = "BYTES", default_value_t = 4 << 20, value_parser = positive, help_heading = "Limits")]
    pub(crate) max_body_bytes: usize,
    #[command(flatten)]
    pub(crate) http: HttpArgs,
    #[command(flatten)]
    pub(crate) log: LogArgs,
    /// OpenTelemetry collector, such as http://localhost:4318 (needs the feature `otlp`)
    #[arg(long, env = "TIDEGATE_OTLP_ENDPOINT", value_name = "URL", help_heading = "Logging")]
    pub(crate) otlp_endpoint: Option<String>,
}

/// The flags of `serve` about keeping conversations.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Sessions")]
pub(crate) struct SessionArgs {
    /// Folder for sessions [default: $XDG_DATA_HOME/tidegate or ~/.local/share/tidegate]
    #[arg(long, env = "TIDEGATE_DATA_DIR", value_name = "FOLDER")]
    pub(crate) data_dir: Option<PathBuf>,
    /// Acknowledge a turn once it is on disk, or up to a second before (memory)
    #[arg(long, env = "TIDEGATE_DURABILITY", value_enum, default_value_t = DurabilityArg::Turn)]
    pub(crate) durability: DurabilityArg,
    /// Object store for snapshots, as s3://BUCKET/FOLDER (needs the feature `s3`)
    #[arg(long, env = "TIDEGATE_STORE", value_name = "URL")]
    pub(crate) store: Option<String>,
    /// Memory for recently used states
    #[arg(long, env = "TIDEGATE_RAM_BUDGET", value_name = "SIZE", default_value = "1GiB", value_parser = size)]
    pub(crate) ram_budget: u64,
    /// Disk space for snapshots; old versions are deleted to stay below it
    #[arg(long, env = "TIDEGATE_DISK_BUDGET", value_name = "SIZE", default_value = "64GiB", value_parser = size)]
    pub(crate) disk_budget: u64,
    /// Disk space of one owner
    #[arg(long, env = "TIDEGATE_OWNER_BUDGET", value_name = "SIZE", default_value = "64GiB", value_parser = size)]
    pub(crate) owner_budget: u64,
    /// Sessions of one owner
    #[arg(long, env = "TIDEGATE_OWNER_SESSIONS", value_name = "COUNT", default_value_t = 100_000, value_parser = positive)]
    pub(crate) owner_sessions: usize,
    /// Versions kept of a session, the current one included
    #[arg(long, env = "TIDEGATE_KEEP_VERSIONS", value_name = "COUNT", default_value_t = 16, value_parser = positive)]
    pub(crate) keep_versions: usize,
    /// Days that a stored response is kept
    #[arg(long, env = "TIDEGATE_RESPONSE_DAYS", value_name = "DAYS", default_value_t = 30, value_parser = positive)]
    pub(crate) response_days: usize,
    /// Memory for the prefix cache; 0 turns it off
    #[arg(long, env = "TIDEGATE_PREFIX_BUDGET", value_name = "SIZE", default_value = "256MiB", value_parser = size)]
    pub(crate) prefix_budget: u64,
    /// Entries of one owner in the prefix cache
    #[arg(long, env = "TIDEGATE_OWNER_PREFIXES", value_name = "COUNT", default_value_t = 64, value_parser = positive)]
    pub(crate) owner_prefixes: usize,
    /// 32 or more random bytes that sign snapshots and encrypt states kept by clients
    #[arg(long, env = "TIDEGATE_SECRET_FILE", value_name = "FILE")]
    pub(crate) secret_file: Option<PathBuf>,
}

// The variants below carry no doc comments: clap would list each value on lines of its own.

/// When a turn is acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DurabilityArg {
    Turn,
    Memory,
}

/// The flags of `generate`.
#[derive(Clone, Debug, Args)]
pub(crate) struct GenerateArgs {
    /// The text to continue
    pub(crate) prompt: String,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

/// The flags of `generate` that choose its tokens.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Sampling (defaults come from the model's generation_config.json)")]
pub(crate) struct SamplingArgs {
    /// Maximum number of tokens to generate
    #[arg(long, short = 'n', value_name = "TOKENS", default_value_t = 256, value_parser = positive)]
    pub(crate) max_tokens: usize,
    /// From 0 (greedy) to 2
    #[arg(long, short, value_name = "NUMBER")]
    pub(crate) temperature: Option<f32>,
    /// Sample from the most likely tokens that together have this probability
    #[arg(long, value_name = "NUMBER")]
    pub(crate) top_p: Option<f32>,
    /// Sample from this many of the most likely tokens; 0 for all
    #[arg(long, value_name = "COUNT")]
    pub(crate) top_k: Option<usize>,
    /// Sample from tokens with at least this fraction of the most likely one's probability
    #[arg(long, value_name = "NUMBER")]
    pub(crate) min_p: Option<f32>,
    /// Sample from the locally typical tokens that together have this probability
    #[arg(long, value_name = "NUMBER")]
    pub(crate) typical_p: Option<f32>,
    /// Above 1, makes tokens that occurred before less likely
    #[arg(long, value_name = "NUMBER")]
    pub(crate) repetition_penalty: Option<f32>,
    /// Subtracted from a token's logit each time it was generated
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    pub(crate) frequency_penalty: Option<f32>,
    /// Subtracted once from the logit of each token that was generated
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    pub(crate) presence_penalty: Option<f32>,
    /// The same seed gives the same text [default: random]
    #[arg(long, value_name = "SEED")]
    pub(crate) seed: Option<u64>,
    /// Stop at this string; may be given up to 16 times
    #[arg(long, value_name = "STRING")]
    pub(crate) stop: Vec<String>,
    /// Continue past the end-of-text token
    #[arg(long)]
    pub(crate) ignore_eos: bool,
}

/// The model and where it runs.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelArgs {
    /// Checkpoint folder [default: the shipped model]
    #[arg(long, env = "TIDEGATE_MODEL", value_name = "FOLDER")]
    pub(crate) model: Option<PathBuf>,
    /// cpu, cuda, cuda:N, or auto: the first usable GPU, else the CPU
    #[arg(long, env = "TIDEGATE_DEVICE", value_name = "DEVICE", default_value_t)]
    pub(crate) device: DeviceChoice,
    /// Compute threads [default: one per core]
    #[arg(long, env = "TIDEGATE_THREADS", value_name = "COUNT", value_parser = within(1, 1024))]
    pub(crate) threads: Option<usize>,
    /// Type of states in memory; bf16 is faster in large batches
    #[arg(long, env = "TIDEGATE_STATE", value_enum, default_value_t = StateArg::F32)]
    pub(crate) state: StateArg,
}

/// The log, which goes to standard error.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Logging")]
pub(crate) struct LogArgs {
    /// Log filter, as LEVEL or TARGET=LEVEL,… [default: info; generate: warn]
    #[arg(long, env = "TIDEGATE_LOG", value_name = "FILTER")]
    pub(crate) log: Option<String>,
    /// Lines of text, or JSON objects
    #[arg(long, env = "TIDEGATE_LOG_FORMAT", value_enum, default_value_t = LogFormat::Human)]
    pub(crate) log_format: LogFormat,
}

/// The format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    Human,
    Json,
}

#[cfg(test)]
mod tests {
    use clap::error::ErrorKind;

    use super::*;

    fn read(line: &[&str]) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(with_command(line.iter().map(OsString::from)))
    }

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::definition().debug_assert();
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
    fn a_port_is_a_number_and_the_address_that_kubernetes_sets_is_ignored() {
        assert_eq!(port("0"), Ok(0));
        assert_eq!(port("tcp://10.0.0.7:8080"), Ok(DEFAULT_PORT));
        assert!(port("65536").is_err() && port("").is_err() && port("udp://10.0.0.7:8080").is_err());
    }

    #[test]
    fn every_flag_of_serve_has_a_variable_a_group_and_a_short_help() {
        let command = Cli::definition();
        let serve = command.find_subcommand("serve").unwrap();
        for flag in serve.get_arguments().filter(|flag| flag.get_id() != "help") {
            let expected = format!("TIDEGATE_{}", flag.get_id().as_str().to_uppercase());
            assert_eq!(flag.get_env().and_then(|name| name.to_str()), Some(expected.as_str()));
            assert!(flag.get_help_heading().is_some(), "{} has no group", flag.get_id());
            // A long help would spread every flag over several lines.
            assert!(flag.get_help().is_some() && flag.get_long_help().is_none(), "{}", flag.get_id());
        }
    }

    #[test]
    fn counts_of_zero_and_below_are_refused() {
        assert!(read(&["tidegate", "--slots", "0"]).is_err());
        assert!(read(&["tidegate", "serve", "--queue", "-1"]).is_err());
    }
}
