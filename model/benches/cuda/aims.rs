//! The performance targets, and whether they were met.

use serde_json::Value;

use super::lines::{Lines, digits, number, percent, with_ends};

/// Operations per second of a large bf16 product on the device of the targets (H200, by cuBLAS on random numbers).
const PRODUCTS: f64 = 790e12;
/// The greatest relative difference between steps after a million tokens and of an empty text.
const FLAT: f64 = 0.03;
const NOT_MEASURED: &str = "not measured";

/// A target and its result.
pub(super) struct Aim {
    pub(super) name: &'static str,
    pub(super) wanted: String,
    pub(super) measured: String,
    /// `None` if it was not measured, or has no bound.
    pub(super) met: Option<bool>,
}

impl Aim {
    fn new(name: &'static str, wanted: &str, found: Option<(String, bool)>) -> Self {
        let (measured, met) = found.map_or_else(|| (NOT_MEASURED.into(), None), |(text, met)| (text, Some(met)));
        Self { name, wanted: wanted.into(), measured, met }
    }

    /// A result without a target.
    fn reported(name: &'static str, found: Option<String>) -> Self {
        let measured = found.unwrap_or_else(|| NOT_MEASURED.into());
        Self { name, wanted: "reported".into(), measured, met: None }
    }

    pub(super) fn outcome(&self) -> &'static str {
        match self.met {
            Some(true) => "met",
            Some(false) => "missed",
            None => "-",
        }
    }
}

/// All targets; without a GPU none is met or missed.
pub(super) fn aims(lines: &Lines) -> Vec<Aim> {
    let mut aims = found(lines);
    let device = lines.of("device").next().and_then(|line| line["device"].as_str());
    if device.is_none_or(|name| name == "emulator") {
        for aim in aims.iter_mut().filter(|aim| aim.measured != NOT_MEASURED) {
            (aim.measured, aim.met) = (format!("no GPU: {}", aim.measured), None);
        }
    }
    aims
}

fn found(lines: &Lines) -> Vec<Aim> {
    let decode = |batch: usize, least: f64| {
        let line = lines.one("decode", &[("batch", batch.into()), ("depth", 0.into())])?;
        let (share, call) = (number(line, "share"), number(line, "call_share"));
        let text = format!(
            "{}: {} ms ({} of a call, tokens chosen)",
            percent(share),
            digits(number(line, "ms")),
            percent(call)
        );
        Some((text, share >= least))
    };
    let recurrence = || {
        let kernel = |start: &'static str| {
            let of = lines.of("kernel").filter(|line| line["of"] == "decode 256");
            of.filter(move |line| line["kernel"].as_str().is_some_and(|name| name.starts_with(start)))
        };
        let bytes = number(kernel("recurrence_").next()?, "bytes");
        let bandwidth = number(lines.of("copy").next()?, "bytes_per_second");
        // With so many rows the features have a kernel of their own; with few, the recurrence computes them.
        let [own, features] =
            ["recurrence_", "features"].map(|start| kernel(start).map(|line| number(line, "ms")).sum::<f64>());
        let share = bytes / ((own + features) / 1e3) / bandwidth;
        let text = format!(
            "{}: the states in and out, in {} ms for all layers, {} of the recurrence and {} of the features before it",
            percent(share),
            digits(own + features),
            digits(own),
            digits(features)
        );
        Some((text, share >= 0.85))
    };
    let prefill = || {
        let rate = number(lines.of("prefill").next()?, "operations_per_second");
        let torch = lines.of("torch").next().map(|line| number(&line["product"], "median"));
        let beside = torch.map_or_else(String::new, |torch| format!(", {} of torch's product", percent(rate / torch)));
        Some((format!("{}: {} TFLOP/s{beside}", percent(rate / PRODUCTS), digits(rate / 1e12)), rate / PRODUCTS >= 0.4))
    };
    let beside = || {
        let line = lines.one("beside", &[("length", 32_768.into())])?;
        let text = format!(
            "{} x: {} ms beside {} ms",
            with_ends(number(line, "ratio"), number(line, "ratio_least"), number(line, "ratio_most")),
            digits(number(line, "ms")),
            digits(number(line, "softmax_ms"))
        );
        Some((text, number(line, "ratio") >= 12.0))
    };
    let flat = || {
        let ratio = |line: &Value| {
            let of = [("batch", line["batch"].clone()), ("depth", 0.into())];
            Some(number(line, "ms") / number(lines.one("decode", &of)?, "ms"))
        };
        let deep = lines.of("decode").filter(|line| line["depth"] != 0);
        let ratios: Vec<(u64, f64)> = deep.filter_map(|line| Some((line["batch"].as_u64()?, ratio(line)?))).collect();
        let each = ratios.iter().map(|(batch, ratio)| format!("{ratio:.3} of {batch}")).collect::<Vec<_>>().join(", ");
        let met = ratios.iter().all(|(_, ratio)| (ratio - 1.0).abs() <= FLAT);
        (!ratios.is_empty()).then(|| (format!("times those of an empty text: {each} rows"), met))
    };
    let sessions = || {
        let line = lines
            .of("sessions")
            .max_by(|a, b| number(a, "tokens_per_second").total_cmp(&number(b, "tokens_per_second")))?;
        Some(format!(
            "{} of them: {} tokens/s in batches of {}; between two tokens of a session, a turn through all batches, p50 {} \
             ms, p99 {} ms over {} turns; a step p50 {} ms, p99 {} ms",
            line["slots"],
            digits(number(line, "tokens_per_second")),
            line["batch"],
            digits(number(&line["gap_ms"], "p50")),
            digits(number(&line["gap_ms"], "p99")),
            line["turns"],
            digits(number(&line["step_ms"], "p50")),
            digits(number(&line["step_ms"], "p99"))
        ))
    };
    let part = |name: &str| {
        let line = lines.0.iter().rev().find(|line| line["what"] == "part" && line["part"] == name)?;
        let (outcome, note) = (line["outcome"].as_str().unwrap_or("?"), line["note"].as_str().unwrap_or(""));
        // A missing tool says nothing about the code.
        (outcome != "absent").then(|| (format!("{outcome}; {note}"), outcome == "passed"))
    };
    vec![
        Aim::new("tests on the device", "pass", part("tests")),
        Aim::new("kernels' tests on the device", "pass", part("kernel tests")),
        Aim::new("compute-sanitizer memcheck", "clean", part("memcheck")),
        Aim::new("compute-sanitizer racecheck", "clean", part("racecheck")),
        Aim::new("decode, batch 1, of the copy's bandwidth", ">= 70 %", decode(1, 0.7)),
        Aim::new("decode, batch 256, of the copy's bandwidth", ">= 60 %", decode(256, 0.6)),
        Aim::new("decode kernels (features, recurrence), 256 slots, of the copy's bandwidth", ">= 85 %", recurrence()),
        Aim::new("prefill of 8,192 tokens, of 790 TFLOP/s", ">= 40 %", prefill()),
        Aim::new("softmax's time in ours after 32,768 tokens, batch 16", ">= 12 x", beside()),
        Aim::new("a step after 1,000,000 tokens", "within 3 %", flat()),
        Aim::reported("10,000 sessions", sessions()),
    ]
}
