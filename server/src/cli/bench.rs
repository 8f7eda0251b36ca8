//! The flags of `bench`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use tidegate_model::WeightType;
use tidegate_server::checkpoint::{BackendChoice, DeviceChoice};

use super::parse::{positive, within};

/// Shown below the flags by `bench --help`.
const NOTES: &str = "\
Cases are measured in turn, round after round, so that a machine whose speed drifts affects all alike;
the report gives the median over the rounds, the least and the most. Everything compared is in memory
at once: each model, and a state for each model and number of threads.

Softmax attention is the baseline: its state is the keys and values of every token, and with --shape its
window holds the longest row. Its past is random keys and values, which cost a step as much as those of
a text (\"past\": \"drawn\" in the JSON).

roof_share compares a case with the machine's limits, which every round measures as well: bytes per
second read from memory (this takes 512 MiB) for decode, f32 fused multiply-adds per second for prefill.
A decode step counts as reading all weights, and reading and writing each row's state; of keys and values
it counts those present, read once. Prefill counts two operations for each matrix parameter that a token
is multiplied with (the output head for the last token only) and for each key and value it attends to.
A share exceeds 1 where weights and states fit into the caches, or where quantised weights run prefill
on 8-bit integers.

--backend candle measures a checkpoint's weights as f32; --threads is how many rows it computes at once.
Families that only candle has have no shares.

On a CUDA device --threads has no effect and shares are not reported. All cases run on one device: if it
has no kernels for a model, also with --device auto, the exit code is 3.

Nothing is sampled: a step ends at the logits.

--draft measures texts instead, of one row, which the engine samples with drafts and without, in turn. Code
and a table are given (--prompt tokens are known, --steps are written), also for random weights; prose is
what a checkpoint writes, and the only text that shows how well a draft model knows it: the others are not
the model's own. Both texts of a round must be the same.";

/// The flags of `bench`.
#[derive(Clone, Debug, Args)]
#[command(after_help = NOTES)]
pub(crate) struct BenchArgs {
    /// Checkpoint folder, GGUF or .pth file, or name on a hub [default: TIDEGATE_MODEL, or the shipped model]
    #[arg(long, value_name = "MODEL", conflicts_with = "shape")]
    pub(crate) model: Option<PathBuf>,
    /// Measure random weights of this size; a token costs the same as with trained ones
    #[arg(long, value_enum)]
    pub(crate) shape: Option<ShapeArg>,
    /// Weight types: f32, bf16, f16, q8_0, q4_0, q4_k [default: as stored; bf16 with --shape]
    #[arg(long, value_delimiter = ',', value_name = "TYPES", value_parser = str::parse::<WeightType>)]
    pub(crate) weights: Vec<WeightType>,
    /// Mixers [default: the checkpoint's; rfa-gate with --shape]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub(crate) mixer: Vec<MixerArg>,
    /// Type of states in memory
    #[arg(long, value_enum, default_value_t = StateArg::F32)]
    pub(crate) state: StateArg,
    /// native: our own kernels; candle: the portable backend; auto: native where it has the model's family
    #[arg(long, env = "TIDEGATE_BACKEND", value_name = "BACKEND", default_value_t)]
    pub(crate) backend: BackendChoice,
    /// cpu, cuda, cuda:N, metal (candle alone), or auto: the first usable GPU, else the CPU
    #[arg(long, env = "TIDEGATE_DEVICE", value_name = "DEVICE", default_value_t)]
    pub(crate) device: DeviceChoice,
    /// Thread counts to measure [default: one per core]
    #[arg(long, env = "TIDEGATE_THREADS", value_delimiter = ',', value_name = "COUNTS", value_parser = within(1, 1024))]
    pub(crate) threads: Vec<usize>,
    /// Tokens that every row has read before the measurement
    #[arg(long, value_delimiter = ',', value_name = "TOKENS", default_value = "0,2048,8192")]
    pub(crate) depths: Vec<usize>,
    /// Rows decoded together
    #[arg(long, value_delimiter = ',', value_name = "ROWS", default_value = "1,8,32", value_parser = positive)]
    pub(crate) batch: Vec<usize>,
    /// Length of the prompt whose prefill is measured at every depth; 0 measures none
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = within(0, 1_000_000))]
    pub(crate) prompt: usize,
    /// Decode steps of one measurement, after a warm-up step [default: 32]; with --draft, tokens of a text [default: 400]
    #[arg(long, value_name = "STEPS", value_parser = within(1, 1_000_000))]
    pub(crate) steps: Option<usize>,
    /// Number of measurements of each case
    #[arg(long, value_name = "ROUNDS", default_value_t = 7, value_parser = within(1, 1000))]
    pub(crate) rounds: usize,
    /// Measure the speedup from draft tokens: generate code, a table and prose with drafts and without
    #[arg(long, conflicts_with_all = ["depths", "batch", "mixer"])]
    pub(crate) draft: bool,
    /// Small model with the same tokens as --model, which proposes draft tokens; a folder, file or name on a hub
    #[arg(long, value_name = "MODEL", requires = "draft")]
    pub(crate) draft_model: Option<PathBuf>,
    /// A table, or one JSON object per line
    #[arg(long, value_enum, default_value_t = BenchOutput::Markdown)]
    pub(crate) output: BenchOutput,
}

impl BenchArgs {
    /// Returns the number of decode steps of one measurement, or of tokens of a text.
    pub(crate) fn steps(&self) -> usize {
        self.steps.unwrap_or(if self.draft { 400 } else { 32 })
    }
}

// The variants below have no doc comments: with them, clap would list each value on its own line.

/// A model size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ShapeArg {
    // 6 layers, 256 wide, 4 heads
    #[value(name = "12m")]
    M12,
    // 12 layers, 768 wide, 12 heads
    #[value(name = "125m")]
    M125,
    // 24 layers, 1,024 wide, 16 heads
    #[value(name = "350m")]
    M350,
}

/// How tokens are mixed. All mixers but softmax have a state of constant size; all but ELU have the same number of
/// features per head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum MixerArg {
    RfaGate,
    Rfa,
    RfaArccos,
    RfaArccosGate,
    Elu,
    EluGate,
    Favor,
    FavorGate,
    // Softmax attention to the last 64 tokens, and RFA-Gate to the tokens before them.
    Hybrid,
    HybridNoGate,
    // With rotary positions, and the keys and values of all tokens.
    Softmax,
}

/// The type of states in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum StateArg {
    F32,
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

/// The format of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchOutput {
    Markdown,
    // Includes the machine's limits in bytes and operations per second; `tidegate-experiments plot-bench` draws the
    // charts.
    Json,
}

/// Returns the name of a value on the command line.
pub(crate) fn word(value: &impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}
