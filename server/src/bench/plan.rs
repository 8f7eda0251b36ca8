//! The benchmark's plan: the validated command line, as models and cases.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::json;
use tidegate_model::{DecoderConfig, StateType, WeightType};
use tidegate_server::checkpoint::OpenDevice;

use crate::cli::{BenchArgs, MixerArg, ShapeArg};

/// Vocabulary size of models with random weights.
const VOCABULARY: usize = 32_000;
/// Dimension of a head's queries, keys and values, and of its random vectors.
const HEAD: usize = 64;
/// The window of softmax attention is a multiple of this.
const WINDOW_STEP: usize = 256;
/// The window of the hybrid mixer.
const HYBRID_WINDOW: usize = 64;

/// A model, and the type of its weights.
#[derive(Clone, Debug)]
pub(super) enum Subject {
    /// A checkpoint: its folder, the type to convert its weights to, and the mixer that it must have.
    Checkpoint { folder: PathBuf, weights: Option<WeightType>, mixer: Option<MixerArg> },
    /// A model with random weights.
    Shape { shape: ShapeArg, weights: WeightType, config: Box<DecoderConfig> },
}

/// The kind of work that a case measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Decode steps of `rows` rows.
    Decode { rows: usize },
    /// Prefill of a prompt in one row.
    Prefill,
}

/// One measurement; all numbers except `rows` are indices into the plan's lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) subject: usize,
    /// The index of the thread count; 0 on a GPU.
    pub(super) lane: usize,
    pub(super) depth: usize,
    pub(super) kind: Kind,
}

/// The models, the cases, and how often to measure them.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) subjects: Vec<Subject>,
    /// All cases use one device, so that models can be compared.
    pub(super) device: OpenDevice,
    pub(super) state: StateType,
    /// The thread counts; empty on a GPU, where no CPU threads compute.
    pub(super) threads: Vec<usize>,
    /// The depths, in ascending order, without duplicates.
    pub(super) depths: Vec<usize>,
    pub(super) batches: Vec<usize>,
    pub(super) prompt: usize,
    pub(super) steps: usize,
    pub(super) rounds: usize,
}

impl Plan {
    /// Makes the plan. It measures `model` if the command line names no shape.
    pub(super) fn new(args: &BenchArgs, device: OpenDevice, model: &Path) -> Result<Self> {
        let subjects = match args.shape {
            Some(shape) => shapes(shape, args)?,
            None => checkpoints(model, args),
        };
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let mut depths = each_once(&args.depths);
        depths.sort_unstable();
        Ok(Self {
            subjects,
            threads: if device.is_cpu() { or(&args.threads, cores) } else { Vec::new() },
            device,
            state: args.state.into(),
            depths: or(&depths, 0),
            batches: or(&args.batch, 1),
            prompt: args.prompt,
            steps: args.steps(),
            rounds: args.rounds,
        })
    }

    /// Returns the cases of one round.
    pub(super) fn cases(&self) -> Vec<Case> {
        let mut kinds: Vec<Kind> = self.batches.iter().map(|&rows| Kind::Decode { rows }).collect();
        if self.prompt > 0 {
            kinds.push(Kind::Prefill);
        }
        let mut cases = Vec::new();
        for subject in 0..self.subjects.len() {
            for lane in 0..self.lanes() {
                for &kind in &kinds {
                    cases.extend((0..self.depths.len()).map(|depth| Case { subject, lane, depth, kind }));
                }
            }
        }
        cases
    }

    /// Returns the number of pools of each model: one per thread count, or one on a GPU.
    pub(super) fn lanes(&self) -> usize {
        self.threads.len().max(1)
    }

    /// Returns the greatest depth.
    pub(super) fn deepest(&self) -> usize {
        self.depths.last().copied().unwrap_or(0)
    }

    /// Returns the number of slots that the largest batch needs.
    pub(super) fn slots(&self) -> usize {
        self.batches.iter().copied().max().unwrap_or(1)
    }
}

/// Returns the list without duplicates, in the same order.
fn each_once<T: Copy + PartialEq>(list: &[T]) -> Vec<T> {
    let mut once = Vec::with_capacity(list.len());
    for &item in list {
        if !once.contains(&item) {
            once.push(item);
        }
    }
    once
}

/// Returns the list without duplicates, or `default` if it is empty.
fn or<T: Copy + PartialEq>(list: &[T], default: T) -> Vec<T> {
    if list.is_empty() { vec![default] } else { each_once(list) }
}

fn checkpoints(folder: &Path, args: &BenchArgs) -> Vec<Subject> {
    let mixers: Vec<Option<MixerArg>> = each_once(&args.mixer).into_iter().map(Some).collect();
    let weights: Vec<Option<WeightType>> = args.weights.iter().copied().map(Some).collect();
    let mut subjects = Vec::new();
    for mixer in or(&mixers, None) {
        for weights in or(&weights, None) {
            subjects.push(Subject::Checkpoint { folder: folder.to_owned(), weights, mixer });
        }
    }
    subjects
}

fn shapes(shape: ShapeArg, args: &BenchArgs) -> Result<Vec<Subject>> {
    // The window holds every token that a row reads.
    let deepest = args.depths.iter().copied().max().unwrap_or(0);
    let tokens = [args.prompt, args.steps(), 1].into_iter().fold(deepest, usize::saturating_add);
    let window = tokens.checked_next_multiple_of(WINDOW_STEP).unwrap_or(tokens);
    let mut subjects = Vec::new();
    for mixer in or(&args.mixer, MixerArg::RfaGate) {
        let config = config(shape, mixer, window)?;
        for weights in or(&args.weights, WeightType::Bf16) {
            subjects.push(Subject::Shape { shape, weights, config: Box::new(config.clone()) });
        }
    }
    Ok(subjects)
}

/// Returns the config of a model of this size: SwiGLU as wide as in a Llama of the same size, the head tied to the
/// embedding.
fn config(shape: ShapeArg, mixer: MixerArg, window: usize) -> Result<DecoderConfig> {
    let (layers, hidden, intermediate) = match shape {
        ShapeArg::M12 => (6, 256, 704),
        ShapeArg::M125 => (12, 768, 2048),
        ShapeArg::M350 => (24, 1024, 2816),
    };
    let mut config = json!({
        "model_type": "rfa_gate", "vocab_size": VOCABULARY, "hidden_size": hidden, "intermediate_size": intermediate,
        "num_hidden_layers": layers, "num_attention_heads": hidden / HEAD, "head_dim": HEAD,
        "tie_word_embeddings": true,
    });
    let own = match mixer {
        // With this feature map, a random vector gives two features (sine and cosine); with the others, one.
        MixerArg::RfaGate => json!({ "proj_dim": HEAD }),
        MixerArg::Rfa => json!({ "proj_dim": HEAD, "gate": false }),
        MixerArg::RfaArccosGate => json!({ "proj_dim": 2 * HEAD, "feature_map": "arc_cosine" }),
        MixerArg::RfaArccos => json!({ "proj_dim": 2 * HEAD, "feature_map": "arc_cosine", "gate": false }),
        MixerArg::EluGate => json!({ "feature_map": "elu" }),
        MixerArg::Elu => json!({ "feature_map": "elu", "gate": false }),
        MixerArg::FavorGate => json!({ "proj_dim": 2 * HEAD, "feature_map": "favor" }),
        MixerArg::Favor => json!({ "proj_dim": 2 * HEAD, "feature_map": "favor", "gate": false }),
        MixerArg::Hybrid => json!({ "attention": "hybrid", "proj_dim": HEAD, "sliding_window": HYBRID_WINDOW }),
        MixerArg::HybridNoGate => {
            json!({ "attention": "hybrid", "proj_dim": HEAD, "sliding_window": HYBRID_WINDOW, "gate": false })
        }
        MixerArg::Softmax => json!({ "attention": "softmax", "sliding_window": window }),
    };
    for (key, value) in own.as_object().into_iter().flatten() {
        config[key] = value.clone();
    }
    // Only the window can be out of bounds.
    DecoderConfig::from_json(&config.to_string())
        .context("--depths, --prompt and --steps determine the window of softmax attention")
}

#[cfg(test)]
mod tests {
    use clap::{Parser, ValueEnum};

    use super::*;
    use crate::cli::{Cli, Command};

    fn plan(line: &str) -> Result<Plan> {
        let line = ["tidegate", "bench"].into_iter().chain(line.split_whitespace());
        let Command::Bench(args) = Cli::try_parse_from(line)?.command else { panic!("another command") };
        Plan::new(&args, OpenDevice::Cpu, args.model.as_deref().unwrap_or(Path::new("shipped")))
    }

    #[test]
    fn batches_and_prompts_are_measured_at_every_depth() {
        let plan = plan("--shape 12m --weights q8_0,f32 --threads 1,2 --depths 512,0,512 --batch 1,8,1").unwrap();
        assert_eq!((&plan.depths[..], &plan.batches[..], plan.slots()), (&[0, 512][..], &[1, 8][..], 8));
        let cases = plan.cases();
        // Weights, thread counts, (two batches and the prompt), depths.
        assert_eq!(cases.len(), 2 * 2 * 3 * 2);
        assert!((1..cases.len()).all(|i| !cases[..i].contains(&cases[i])));
        assert_eq!(cases.iter().filter(|case| case.kind == Kind::Prefill).count(), 8);
    }

    #[test]
    fn without_a_prompt_no_prefill_is_measured() {
        let cases = plan("--shape 12m --prompt 0").unwrap().cases();
        assert!(!cases.is_empty() && cases.iter().all(|case| case.kind != Kind::Prefill));
    }

    #[test]
    fn a_checkpoint_keeps_its_weights_and_mixer_by_default() {
        let subjects = plan("").unwrap().subjects;
        let [Subject::Checkpoint { folder, weights: None, mixer: None }] = &subjects[..] else {
            panic!("{subjects:?}");
        };
        assert_eq!(folder.to_str(), Some("shipped"));
        let subjects = plan("--model x --weights q4_0,q8_0").unwrap().subjects;
        assert!(matches!(&subjects[1], Subject::Checkpoint { weights: Some(WeightType::Q8_0), .. }), "{subjects:?}");
    }

    #[test]
    fn shapes_have_as_many_parameters_as_their_names_say() {
        for (shape, least, most) in [("12m", 12e6, 14e6), ("125m", 105e6, 130e6), ("350m", 330e6, 370e6)] {
            let subjects = plan(&format!("--shape {shape}")).unwrap().subjects;
            let [Subject::Shape { config, weights: WeightType::Bf16, .. }] = &subjects[..] else {
                panic!("{subjects:?}");
            };
            let parameters = config.parameters() as f64;
            assert!((least..most).contains(&parameters), "{shape}: {parameters}");
            // As many as in a Llama of the same widths, except for the gate and the lengths of the random vectors.
            let (hidden, layers) = (config.hidden_size as f64, config.num_hidden_layers as f64);
            let block = 4.0 * hidden * hidden + 3.0 * hidden * config.intermediate_size as f64 + 2.0 * hidden;
            let llama = layers * block + (VOCABULARY as f64 + 1.0) * hidden;
            assert!((parameters / llama - 1.0).abs() < 2e-3, "{shape}: {parameters}, a Llama has {llama}");
        }
    }

    #[test]
    fn a_shape_has_the_requested_mixer() {
        for mixer in MixerArg::value_variants() {
            let name = crate::cli::word(mixer);
            let subjects = plan(&format!("--shape 12m --mixer {name}")).unwrap().subjects;
            let [Subject::Shape { config, .. }] = &subjects[..] else { panic!("{subjects:?}") };
            assert_eq!(config.mixer(), name);
        }
    }

    #[test]
    fn the_window_of_softmax_holds_every_token_that_a_row_sees() {
        let line = "--shape 12m --mixer softmax,rfa-gate --depths 0,2048 --prompt 64 --steps 191";
        let subjects = plan(line).unwrap().subjects;
        let windows: Vec<Option<usize>> = subjects
            .iter()
            .map(|subject| match subject {
                Subject::Shape { config, .. } => config.sliding_window,
                Subject::Checkpoint { .. } => panic!("{subject:?}"),
            })
            .collect();
        assert_eq!(windows, [Some(2304), None]);
    }

    #[test]
    fn errors_name_the_mistake() {
        for (line, words) in [
            ("--shape 12m --model x", "cannot be used with"),
            ("--shape 13m", "125m"),
            ("--weights q5_0", "must be one of f32, bf16, f16, q8_0, q4_0, q4_k"),
            ("--threads 1,0", "must be at least 1"),
            ("--threads 1025", "must be at most 1024"),
            ("--prompt 1000001", "must be at most 1000000"),
            ("--steps 1000001", "must be at most 1000000"),
            ("--rounds 1001", "must be at most 1000"),
            ("--shape 12m --mixer softmax --depths 99999999", "--depths, --prompt and --steps determine the window"),
            ("--depths 1,-1", "invalid"),
        ] {
            let error = plan(line).unwrap_err().to_string();
            assert!(error.contains(words), "{line}: {error}");
        }
    }
}
