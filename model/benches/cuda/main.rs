//! Measures the decoder on one CUDA device: decode, its kernels one by one, prefill, many sessions, and a softmax decoder of
//! the same shape in PyTorch (`softmax.py`) for comparison. `run.sh` runs it with the tests, and explains how.
//!
//!     cargo bench --locked --workspace --features tidegate-model/cuda --bench cuda -- measure
//!     cargo bench --locked --workspace --features tidegate-model/cuda-emulator --bench cuda -- measure --emulated
//!
//! `measure` writes a line of JSON for each result, and progress to standard error; `table` compares those lines with the
//! targets. A time is the median of rounds, with the least and the greatest; a round measures everything of a part once.
//! The time of a step is that of many in a row without copies to the host; `call_ms` is that of one call that samples on
//! the device, as the server makes it, and `logits_ms` that of one call that copies its logits to the host.

mod aims;
mod beside;
mod choose;
mod clock;
mod decode;
mod lines;
mod prefill;
mod sessions;
mod subject;
mod table;

use std::error::Error;
use std::path::PathBuf;
use std::time::Instant;

use serde_json::{Value, json};
use tidegate_model::cuda::measure::Copies;
use tidegate_model::cuda::{CudaDecoder, CudaDevice};
use tidegate_model::{Backend, WeightType};

use clock::{Budget, Times};
use subject::Subject;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const USAGE: &str =
    "measure [--device N | --emulated] [--shape 1.3b|125m] [--checkpoint FOLDER] [--softmax FILE] [--seconds N] [--only PARTS]
open [--device N]
table FILE --out FOLDER [--date YYYY-MM-DD]
PARTS: some of decode,kernels,prefill,sessions,beside, with commas; all where it is absent.
--softmax is softmax.py, run by $PYTHON (python3); without it nothing is measured beside.";

/// The command line.
#[derive(Default)]
struct Args {
    words: Vec<String>,
    device: usize,
    emulated: bool,
    shape: Option<String>,
    checkpoint: Option<PathBuf>,
    softmax: Option<PathBuf>,
    seconds: Option<f64>,
    only: Option<Vec<String>>,
    out: Option<PathBuf>,
    date: Option<String>,
}

impl Args {
    fn parse() -> Result<Self> {
        let mut args = Self::default();
        let mut given = std::env::args().skip(1);
        while let Some(word) = given.next() {
            let mut value = || given.next().ok_or_else(|| format!("{word}: a value is missing"));
            match word.as_str() {
                "--bench" => {} // cargo adds it
                "--emulated" => args.emulated = true,
                "--device" => args.device = value()?.parse()?,
                "--shape" => args.shape = Some(value()?),
                "--checkpoint" => args.checkpoint = Some(value()?.into()),
                "--softmax" => args.softmax = Some(value()?.into()),
                "--seconds" => args.seconds = Some(value()?.parse()?),
                "--only" => args.only = Some(value()?.split(',').map(str::to_owned).collect()),
                "--out" => args.out = Some(value()?.into()),
                "--date" => args.date = Some(value()?),
                flag if flag.starts_with('-') => return Err(format!("{flag} is not known\n{USAGE}").into()),
                _ => args.words.push(word),
            }
        }
        Ok(args)
    }

    fn open(&self) -> Result<CudaDevice> {
        #[cfg(feature = "cuda-emulator")]
        if self.emulated {
            return Ok(CudaDevice::emulated());
        }
        if self.emulated {
            return Err("--emulated: built without the feature cuda-emulator".into());
        }
        Ok(CudaDevice::open(self.device)?)
    }

    fn wants(&self, part: &str) -> bool {
        self.only.as_ref().is_none_or(|only| only.iter().any(|name| name == part))
    }
}

/// Writes a line of progress.
fn say(text: &str) {
    eprintln!("cuda: {text}");
}

/// What all parts use.
struct Bench {
    device: CudaDevice,
    subject: Subject,
    budget: Budget,
    /// Bytes per second that a copy on the device reads and writes.
    bandwidth: f64,
}

impl Bench {
    /// Writes a line of results.
    fn line(&self, what: &str, mut fields: Value) {
        fields["what"] = what.into();
        fields["shape"] = self.subject.name.into();
        println!("{fields}");
    }

    /// The bytes that had to be moved, as a share of those that a copy moves in this time.
    fn share(&self, bytes: usize, seconds: f64) -> f64 {
        bytes as f64 / seconds / self.bandwidth
    }
}

/// Opens the device, for which the driver compiles the kernels.
fn open(args: &Args) -> Result<CudaDevice> {
    let clock = Instant::now();
    let device = args.open()?;
    let (free, all) = device.memory()?;
    let seconds = clock.elapsed().as_secs_f64();
    println!(
        "{}",
        json!({"what": "device", "device": device.name(), "free": free, "memory": all, "open_seconds": seconds})
    );
    say(&format!("{}: {free} of {all} bytes free, opened in {seconds:.1} s", device.name()));
    Ok(device)
}

fn bandwidth(device: &CudaDevice, subject: &Subject, budget: &Budget) -> Result<f64> {
    let copies = Copies::new(device, subject.copied)?;
    budget.warm(|times| Ok(copies.run(times)?))?;
    let times = Times::of(&[budget.repeated(|times| Ok(copies.run(times)?), subject.rounds)?]);
    let rate = |seconds: f64| copies.bytes() as f64 / seconds;
    let median = rate(times[0].median);
    let line = json!({"what": "copy", "bytes": copies.bytes(), "rounds": subject.rounds, "bytes_per_second": median,
        "least": rate(times[0].most), "most": rate(times[0].least)});
    println!("{line}");
    say(&format!("a copy on the device: {:.3} TB/s, read and written", median / 1e12));
    Ok(median)
}

fn measure(args: &Args) -> Result<()> {
    let budget = Budget::new(args.seconds, if args.emulated { 0.0 } else { 0.06 });
    // PyTorch starts while the random weights are made.
    let subject = Subject::new(args.shape.as_deref().unwrap_or("1.3b"), args.emulated)?;
    let mut child = match &args.softmax {
        Some(file) if args.wants("beside") => match beside::Child::start(file, &subject) {
            Ok(child) => Some(child),
            Err(error) => {
                failed("beside", &error);
                None
            }
        },
        _ => None,
    };
    let device = open(args)?;
    let clock = Instant::now();
    say(&format!("drawing the weights of {}", subject.name));
    let decoder = CudaDecoder::random(subject.config.clone(), WeightType::Bf16, 1, &device)?;
    say(&format!("{} bytes of weights in {:.1} s", decoder.weight_bytes(), clock.elapsed().as_secs_f64()));
    // PyTorch's start would disturb the measurements.
    let ready = child.as_mut().map(beside::Child::ready);
    if let Some(Err(error)) = ready {
        failed("beside", &error);
        child = None;
    }
    let bandwidth = bandwidth(&device, &subject, &budget)?;
    let bench = Bench { device, subject, budget, bandwidth };
    let part = |name: &str, run: &mut dyn FnMut() -> Result<()>| {
        if !args.wants(name) {
            return;
        }
        if bench.budget.is_spent() {
            return failed(name, &"no time was left");
        }
        let clock = Instant::now();
        say(name);
        match run() {
            Ok(()) => say(&format!("{name}: {:.1} s", clock.elapsed().as_secs_f64())),
            Err(error) => failed(name, &error),
        }
    };
    part("decode", &mut || decode::decode(&bench, &decoder));
    part("kernels", &mut || decode::kernels(&bench, &decoder));
    part("prefill", &mut || prefill::prefill(&bench, &decoder));
    if let Some(child) = &mut child {
        part("beside", &mut || beside::beside(&bench, &decoder, child));
    }
    drop((child, decoder));
    if let Some(folder) = &args.checkpoint {
        part("sessions", &mut || sessions::sessions(&bench, folder));
    }
    Ok(())
}

/// Reports a part that failed; the others continue.
fn failed(part: &str, why: &dyn std::fmt::Display) {
    let why = why.to_string();
    say(&format!("{part}: {why}"));
    println!("{}", json!({"what": "failed", "part": part, "why": why}));
}

fn main() {
    let outcome = Args::parse().and_then(|args| match args.words.first().map(String::as_str) {
        Some("measure") => measure(&args),
        Some("open") => open(&args).map(drop),
        Some("table") => table::table(
            args.words.get(1).ok_or("table: a file is missing")?.as_ref(),
            args.out.as_deref().ok_or("table: --out is missing")?,
            args.date.as_deref(),
        ),
        _ => {
            eprintln!("{USAGE}");
            Ok(())
        }
    });
    if let Err(error) = outcome {
        eprintln!("cuda: {error}");
        std::process::exit(1);
    }
}
