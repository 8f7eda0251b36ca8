//! The flags of `bench`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use tidegate_model::WeightType;
use tidegate_server::checkpoint::DeviceChoice;

use super::positive;

/// What `bench --help` says below its flags.
const NOTES: &str = "\
Everything is measured in turn, round after round, so that a machine whose speed drifts is the same
to all; what is told is the median over the rounds, the least and the most. Everything that is
compared is held in memory at once: each model, and states for each model and number of threads.

Softmax attention is here to be compared with: its state is the keys and values of every token, and its
window with --shape is as long as any row becomes. Its past is not read but drawn: random keys and
values, which cost a step what a text's own cost (as JSON has it, \"past\": \"drawn\").

roof_share is how much a case reaches of what this machine gives at most. Every round also measures
how many bytes a second the threads read from memory (for which it takes 512 MiB), and how many
operations a second they make of fused multiply-adds on f32. Decoding is held against the first: a
step reads all weights once, and reads and writes the state of every row, but of the keys and values of
softmax attention and of the hybrid's window reads those that are there, and writes none. Prefill is
held against the second: two operations for every parameter of the matrices that a token is multiplied
with (of the output head for the last token alone) and for every number of the keys and values that it
sees, and none for the rest.

A share can be over 1. Where weights and states fit into the caches, they are read faster than from
memory. With quantised weights prompts are read by products of 8-bit integers, of which the machine
makes more than of f32.

On a CUDA device there are no threads to choose, and its roofs are not measured: shares are told of the
CPU alone. What is compared is compared on one device: a model that it has no kernels for ends the
measurement with exit code 3, also where --device auto has chosen it.

Nothing is sampled: decoding ends at the logits.";

/// The flags of `bench`.
#[derive(Clone, Debug, Args)]
#[command(after_long_help = NOTES)]
pub(crate) struct BenchArgs {
    /// Checkpoint folder. Where neither this nor --shape is given, that of TIDEGATE_MODEL, or the shipped one.
    #[arg(long, value_name = "FOLDER", conflicts_with = "shape")]
    pub(crate) model: Option<PathBuf>,
    /// A model of this size with random weights: a token costs what it costs with trained ones.
    #[arg(long, value_enum)]
    pub(crate) shape: Option<ShapeArg>,
    /// How weights are held, one or several: f32, bf16, f16, q8_0, q4_0, q4_k. As the checkpoint stores them where
    /// absent; bf16 with --shape.
    #[arg(long, value_delimiter = ',', value_name = "TYPES", value_parser = str::parse::<WeightType>)]
    pub(crate) weights: Vec<WeightType>,
    /// What mixes tokens, one or several. The checkpoint's own where absent; rfa-gate with --shape.
    #[arg(long, value_enum, value_delimiter = ',')]
    pub(crate) mixer: Vec<MixerArg>,
    /// How states are held.
    #[arg(long, value_enum, default_value_t = StateArg::F32)]
    pub(crate) state: StateArg,
    /// Where all of it is computed: `cpu`; `cuda`, or `cuda:N` for another device than the first; `auto` for the first
    /// CUDA device, or the CPU where the build or the machine has none. Where `cuda` cannot be had the exit code is 3.
    #[arg(long, env = "TIDEGATE_DEVICE", value_name = "DEVICE", default_value_t)]
    pub(crate) device: DeviceChoice,
    /// Threads that compute, one number or several; one for each core where absent.
    #[arg(long, env = "TIDEGATE_THREADS", value_delimiter = ',', value_name = "COUNTS", value_parser = within(1, 1024))]
    pub(crate) threads: Vec<usize>,
    /// Tokens that every row has read before, one number or several. The deepest is read once, in full; for softmax
    /// attention a state of random numbers stands for it.
    #[arg(long, value_delimiter = ',', value_name = "TOKENS", default_value = "0,2048,8192")]
    pub(crate) depths: Vec<usize>,
    /// Rows that are decoded together, one number or several.
    #[arg(long, value_delimiter = ',', value_name = "ROWS", default_value = "1,8,32", value_parser = positive)]
    pub(crate) batch: Vec<usize>,
    /// Tokens of the prompt whose reading is measured at every depth, after one that does not count; 0 measures none.
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = within(0, 1_000_000))]
    pub(crate) prompt: usize,
    /// Decoding steps of one measurement, after one that does not count.
    #[arg(long, value_name = "STEPS", default_value_t = 32, value_parser = within(1, 1_000_000))]
    pub(crate) steps: usize,
    /// Times that every case is measured.
    #[arg(long, value_name = "ROUNDS", default_value_t = 7, value_parser = within(1, 1000))]
    pub(crate) rounds: usize,
    /// What is printed once all is measured.
    #[arg(long, value_enum, default_value_t = BenchOutput::Markdown)]
    pub(crate) output: BenchOutput,
}

/// Reads a number from `least` to `most`.
fn within(least: usize, most: usize) -> impl Fn(&str) -> Result<usize, String> + Clone + Send + Sync + 'static {
    move |text: &str| {
        let number = text.parse::<usize>().map_err(|error| error.to_string())?;
        if number < least {
            return Err(format!("must be at least {least}"));
        }
        if number > most {
            return Err(format!("must be at most {most}"));
        }
        Ok(number)
    }
}

/// A size of model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ShapeArg {
    /// 6 layers, 256 wide, 4 heads.
    #[value(name = "12m")]
    M12,
    /// 12 layers, 768 wide, 12 heads.
    #[value(name = "125m")]
    M125,
    /// 24 layers, 1,024 wide, 16 heads.
    #[value(name = "350m")]
    M350,
}

/// What mixes tokens. All but softmax have a state of constant size; all but ELU as many features a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum MixerArg {
    /// Random feature attention with the gate.
    RfaGate,
    /// Random feature attention without it.
    Rfa,
    /// With arc-cosine features.
    RfaArccos,
    /// The same with the gate.
    RfaArccosGate,
    /// Linear attention with ELU + 1.
    Elu,
    /// The same with the gate.
    EluGate,
    /// Positive features (FAVOR+).
    Favor,
    /// The same with the gate.
    FavorGate,
    /// Softmax attention to the last 64 tokens, RFA-Gate to those before.
    Hybrid,
    /// The same without the gate.
    HybridNoGate,
    /// Softmax attention with rotary positions: keys and values of all tokens.
    Softmax,
}

/// How states are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum StateArg {
    /// As computed.
    F32,
    /// Half the bytes.
    Bf16,
}

impl From<StateArg> for tidegate_model::StateType {
    fn from(arg: StateArg) -> Self {
        match arg {
            StateArg::F32 => Self::F32,
            StateArg::Bf16 => Self::Bf16,
        }
    }
}

/// How `bench` prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchOutput {
    /// A table.
    Markdown,
    /// One object a line, with the machine's roofs in bytes and operations a second; `tidegate-experiments plot-bench` draws
    /// them.
    Json,
}

/// The word of an argument on the command line.
pub(crate) fn word(value: &impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}
