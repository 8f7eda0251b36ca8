//! The command line: every flag, its environment variable, and its help.

mod about;
mod bench;
mod chat;
mod config;
mod eval;
mod generate;
mod health;
mod http;
mod hub;
mod parse;
mod sessions;
mod shared;
mod storage;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Arg, Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use tidegate_server::checkpoint::{CPU_SLOTS, MOST_GPU_SLOTS};
use tidegate_server::engine::{DRAFT_MAX, MOST_TOKENS};

pub(crate) use about::{print_completions, print_man_page};
pub(crate) use bench::{BenchArgs, BenchOutput, MixerArg, ShapeArg, word};
pub(crate) use chat::ChatArgs;
pub(crate) use eval::EvalArgs;
pub(crate) use generate::{GenerateArgs, SamplingArgs};
pub(crate) use health::HealthArgs;
pub(crate) use http::HttpArgs;
pub(crate) use hub::{ModelsArgs, ModelsOutput, PullArgs};
pub(crate) use parse::Budget;
use parse::{DEFAULT_PORT, bytes, port, positive, slots, within};
pub(crate) use sessions::{SessionsArgs, SessionsCommand};
pub(crate) use shared::{LogArgs, LogFormat, ModelArgs};
pub(crate) use storage::{DurabilityArg, PlaceArgs, SecretUrl, SessionArgs, Switch};

const NOTES: &str = "\
Without a command, flags are those of `serve`: `tidegate --port 9000`.

Exit codes: 0 success, 1 error, 2 wrong command line,
3 the device named by --device is missing or cannot run the model.";

const ENVIRONMENT: &str = "\
Every flag has an environment variable: --max-body-bytes is TIDEGATE_MAX_BODY_BYTES.
Sizes are bytes, or a number followed by KiB, MiB, GiB or TiB, for short K, M, G or T.";

/// Serves language models whose memory of a conversation has a constant size.
#[derive(Debug, Parser)]
#[command(name = "tidegate", version, after_help = NOTES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Cli {
    /// Parses the arguments of this process. Prints the help or an error, and exits, if there is nothing to run.
    pub(crate) fn read() -> Self {
        let (args, definition) = (with_command(std::env::args_os()), Self::definition());
        let serve = definition.find_subcommand("serve").filter(|_| args.get(1).is_some_and(|name| name == "serve"));
        // Showing the help must not need the file.
        let serve = serve.filter(|_| !args.iter().any(|arg| arg == "-h" || arg == "--help"));
        let (args, file) =
            match serve.map(|serve| config::with_file(args.clone(), serve, |name| std::env::var_os(name))) {
                None => (args, None),
                Some(Ok(found)) => found,
                Some(Err(error)) => definition.clone().error(clap::error::ErrorKind::InvalidValue, error).exit(),
            };
        let parsed = definition.try_get_matches_from(args).and_then(|matches| Self::from_arg_matches(&matches));
        parsed.unwrap_or_else(|error| {
            if let Some(file) = file.filter(|_| error.use_stderr()) {
                // The wrong flag may come from the file.
                eprintln!("with the flags in {}:", file.display());
            }
            error.exit()
        })
    }

    /// Returns the definition of the commands, without a variable's name beside every flag, because `ENVIRONMENT`
    /// states the rule. The help of `chat` shows only the folder among the flags about keeping conversations: most
    /// users need no other.
    pub(crate) fn definition() -> clap::Command {
        let rare = |arg: &Arg| arg.get_help_heading() == Some(storage::HEADING) && arg.get_id() != "data_dir";
        Self::command()
            .mut_subcommands(|command| command.mut_args(|arg| arg.hide_env(true)))
            .mut_subcommand("chat", |chat| chat.mut_args(|arg| if rare(&arg) { arg.hide(true) } else { arg }))
    }
}

/// Inserts `serve` if no command is named. If the program itself had the flags of `serve`, a wrong variable for one of
/// them would stop the other commands as well.
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

fn slots_help() -> String {
    format!(
        "Requests that run at once; auto: {CPU_SLOTS} on the CPU, as many as fit on a GPU (at most {})",
        thousands(MOST_GPU_SLOTS)
    )
}

/// Formats a number with a comma before every three digits.
fn thousands(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve a model over HTTP (the default)
    #[command(after_help = ENVIRONMENT)]
    Serve(Box<ServeArgs>),
    /// Continue a prompt in the terminal
    Generate(GenerateArgs),
    /// Talk with a model in the terminal; the conversation is kept
    Chat(Box<ChatArgs>),
    /// Measure tokens per second on this machine
    Bench(BenchArgs),
    /// Measure how well a model predicts a text: perplexity and bits per byte
    Eval(EvalArgs),
    /// Download a model from a hub into the cache, and print where it is
    Pull(PullArgs),
    /// List the models in the hub cache, and whether they can be served
    Models(ModelsArgs),
    /// Check, repair, back up or move stored sessions
    Sessions(SessionsArgs),
    /// Ask a server on this machine whether it is ready
    Health(HealthArgs),
    /// Print shell completions, to be sourced
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Print a man page
    Man {
        /// The command to describe [default: tidegate itself]
        command: Option<String>,
    },
    /// Try the grammars that a server writes to standard input
    #[command(hide = true)]
    CompileGrammars,
}

/// The source of draft tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DraftArg {
    /// Prompt lookup: the tokens that followed the same tokens earlier in the text
    Ngram,
    /// No drafts
    None,
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
    // The help texts that state limits are built from the constants.
    #[arg(help = slots_help(), long, env = "TIDEGATE_SLOTS", value_name = "COUNT|auto", default_value = "auto", value_parser = slots)]
    pub(crate) slots: usize,
    /// Requests that may wait for a slot; further ones get 429
    #[arg(long, env = "TIDEGATE_QUEUE", value_name = "COUNT", default_value_t = 256, value_parser = positive)]
    pub(crate) queue: usize,
    /// Seconds that a request keeps its slot while its client reads nothing
    #[arg(long, env = "TIDEGATE_STALL_SECONDS", value_name = "SECONDS", default_value_t = 60)]
    pub(crate) stall_seconds: u64,
    /// Seconds to finish running requests after SIGTERM; a second signal ends them at once
    #[arg(long, env = "TIDEGATE_DRAIN_SECONDS", value_name = "SECONDS", default_value_t = 30)]
    pub(crate) drain_seconds: u64,
    /// Source of draft tokens, so that the model reads several per step when few requests run; texts stay the same
    #[arg(long, env = "TIDEGATE_DRAFT", value_name = "ngram|none", value_enum, default_value_t = DraftArg::Ngram)]
    pub(crate) draft: DraftArg,
    /// Maximum draft tokens per request and step
    #[arg(long, env = "TIDEGATE_DRAFT_MAX", value_name = "COUNT", default_value_t = DRAFT_MAX, value_parser = within(1, MOST_TOKENS - 1))]
    pub(crate) draft_max: usize,
    /// Small model with the same tokens as --model, for drafts where lookup is right less often; a folder, file or name
    #[arg(long, env = "TIDEGATE_DRAFT_MODEL", value_name = "MODEL")]
    pub(crate) draft_model: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Model name in the API, if there is one model [default: ORG/NAME, the folder's or file's name, or the one in a GGUF file]
    #[arg(long, env = "TIDEGATE_MODEL_NAME", value_name = "NAME", help_heading = "Model")]
    pub(crate) model_name: Option<String>,
    /// Folder whose subfolders are further models, named like them, and then its .gguf and .pth files; read again on SIGHUP
    #[arg(long, env = "TIDEGATE_MODELS_DIR", value_name = "FOLDER", help_heading = "Model")]
    pub(crate) models_dir: Option<PathBuf>,
    /// Answer requests for unknown models with the first one
    #[arg(long, env = "TIDEGATE_ANY_MODEL_NAME", value_name = "on|off", value_enum, num_args = 0..=1, require_equals = true, default_missing_value = "on", default_value_t = Switch::Off, hide_default_value = true, help_heading = "Model")]
    pub(crate) any_model_name: Switch,
    #[command(flatten)]
    pub(crate) sessions: SessionArgs,
    /// Maximum value of max_tokens in a request
    #[arg(long, env = "TIDEGATE_MAX_TOKENS_LIMIT", value_name = "TOKENS", default_value_t = 1_000_000, value_parser = positive, help_heading = "Limits")]
    pub(crate) max_tokens_limit: usize,
    /// Maximum prompt length; an encoder-decoder's own limit applies too
    #[arg(long, env = "TIDEGATE_MAX_PROMPT_TOKENS", value_name = "TOKENS", default_value_t = 1_000_000, value_parser = positive, help_heading = "Limits")]
    pub(crate) max_prompt_tokens: usize,
    /// Maximum size of a request body
    #[arg(long, env = "TIDEGATE_MAX_BODY_BYTES", value_name = "SIZE", default_value = "4MiB", value_parser = bytes, help_heading = "Limits")]
    pub(crate) max_body_bytes: usize,
    #[command(flatten)]
    pub(crate) http: HttpArgs,
    /// TOML file with any of these flags under their names; flags and variables take precedence
    #[arg(long, env = "TIDEGATE_CONFIG", value_name = "FILE", help_heading = "Serving")]
    pub(crate) config: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) log: LogArgs,
    /// OpenTelemetry collector, such as http://localhost:4318 (needs the feature `otlp`)
    #[arg(long, env = "TIDEGATE_OTLP_ENDPOINT", value_name = "URL", help_heading = "Logging")]
    pub(crate) otlp_endpoint: Option<String>,
}

#[cfg(test)]
mod tests {
    use clap::error::ErrorKind;

    use super::parse::size;
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
        assert!(matches!(read(&["tidegate", "chat"]).unwrap().command, Command::Chat(_)));
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
            // A long help text would spread every flag over several lines.
            assert!(flag.get_help().is_some() && flag.get_long_help().is_none(), "{}", flag.get_id());
        }
    }

    #[test]
    fn the_budget_of_an_owner_is_a_size_or_a_percentage_of_the_disks() {
        let budget = |text: &str| match read(&["tidegate", "--owner-budget", text]).map(|cli| cli.command) {
            Ok(Command::Serve(args)) => args.sessions.owner_budget,
            _ => None,
        };
        for (text, expected) in [
            ("3GiB", Budget::Bytes(3 << 30)),
            ("1000", Budget::Bytes(1000)),
            ("1%", Budget::Percent(1)),
            ("100 %", Budget::Percent(100)),
        ] {
            assert_eq!(budget(text), Some(expected), "{text}");
        }
        for wrong in ["0%", "101%", "%", "2.5%", "-1%", "GiB%", "many"] {
            assert_eq!(budget(wrong), None, "{wrong}");
        }
        assert_eq!([Budget::Bytes(7).of(3), Budget::Percent(25).of(1000)], [7, 250]);
        assert_eq!(Budget::Percent(100).of(u64::MAX), u64::MAX);
    }

    #[test]
    fn a_size_has_a_unit_in_full_or_in_short() {
        for (text, bytes) in
            [("7", 7), ("2K", 2 << 10), ("3M", 3 << 20), ("1G", 1 << 30), ("1 GiB", 1 << 30), ("2T", 2 << 40)]
        {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for wrong in ["", "G", "1g", "1GB", "1iB", "1.5G", "-1", "99999999T"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
        assert_eq!((bytes("4MiB"), bytes("0").is_err()), (Ok(4 << 20), true));
    }

    #[test]
    fn help_shows_the_limits_of_the_code() {
        let help = Cli::definition().find_subcommand_mut("serve").unwrap().render_help().to_string();
        assert!(help.contains("auto: 64 on the CPU, as many as fit on a GPU (at most 16,384)"), "{help}");
        assert!(help.contains("32 or more random bytes"), "{help}");
        assert_eq!([7, 999, 1000, 16_384, 1_000_000].map(thousands), ["7", "999", "1,000", "16,384", "1,000,000"]);
    }

    #[test]
    fn chat_takes_the_flags_of_sessions_and_shows_the_folder_alone() {
        let read = read(&["tidegate", "chat", "--data-dir", "x", "--disk-budget", "1G", "--keep-versions", "3"]);
        let Ok(Cli { command: Command::Chat(args) }) = read else { panic!("chat is refused") };
        assert_eq!((args.sessions.disk_budget, args.sessions.keep_versions), (1 << 30, 3));
        let help = Cli::definition().find_subcommand_mut("chat").unwrap().render_help().to_string();
        assert!(help.contains("--data-dir") && help.contains("--temperature"), "{help}");
        assert!(!help.contains("--disk-budget"), "{help}");
    }

    #[test]
    fn counts_of_zero_and_below_are_refused() {
        assert!(read(&["tidegate", "--slots", "0"]).is_err());
        assert!(read(&["tidegate", "serve", "--queue", "-1"]).is_err());
    }
}
