//! Comparison with softmax attention: a decoder of the same shape in PyTorch, in a process of its own that takes one
//! command per line, in turn with ours.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tidegate_model::cuda::CudaDecoder;
use tidegate_model::cuda::measure::wait;
use tidegate_model::{Backend, StateType};

use super::clock::{Times, once};
use super::decode::{Step, deepen, pool, step_bytes};
use super::subject::Subject;
use super::{Bench, Result, failed, say};

/// Time limits of its start and of an answer.
const START: Duration = Duration::from_secs(150);
const ANSWER: Duration = Duration::from_mins(1);

/// softmax.py.
pub(super) struct Child {
    process: std::process::Child,
    lines: Receiver<String>,
}

impl Child {
    pub(super) fn start(file: &Path, subject: &Subject) -> Result<Self> {
        let python = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
        let mut process = Command::new(python)
            .arg(file)
            .args(["--serve", "--shape", &subject.of_softmax().to_string()])
            .env("PYTHONUNBUFFERED", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = process.stdout.take().ok_or("softmax.py: has no output")?;
        let (to, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(std::io::Result::ok) {
                if to.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self { process, lines })
    }

    /// The answer to the last command. If none comes, the process is ended: a late answer would count as the next one.
    fn answer(&mut self, within: Duration) -> Result<Value> {
        let end = Instant::now() + within;
        loop {
            let line = match self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(line) => line,
                Err(error) => {
                    self.end();
                    return Err(format!("softmax.py: no answer, so it was ended: {error}").into());
                }
            };
            // Libraries print other lines.
            let Some(answer) = serde_json::from_str(&line).ok().filter(Value::is_object) else {
                say(&format!("softmax.py: {line}"));
                continue;
            };
            return match answer["error"].as_str() {
                Some(error) => Err(format!("softmax.py: {error}").into()),
                None => Ok(answer),
            };
        }
    }

    fn end(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    fn has_ended(&self) -> bool {
        self.process.stdin.is_none()
    }

    /// Waits until it has started.
    pub(super) fn ready(&mut self) -> Result<()> {
        let answer = self.answer(START)?;
        say(&format!("softmax.py is ready: {answer}"));
        Ok(())
    }

    fn ask(&mut self, request: &Value) -> Result<Value> {
        let to = self.process.stdin.as_mut().ok_or("softmax.py: was ended")?;
        writeln!(to, "{request}")?;
        to.flush()?;
        self.answer(ANSWER)
    }

    fn number(&mut self, request: &Value, field: &str) -> Result<f64> {
        let answer = self.ask(request)?;
        answer[field].as_f64().ok_or_else(|| format!("softmax.py: {field} is missing in {answer}").into())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // It ends when its input does; one that hangs does not delay the rest.
        drop(self.process.stdin.take());
        std::thread::sleep(Duration::from_millis(200));
        self.end();
    }
}

/// One length, and the rounds of both decoders.
struct Case {
    length: u64,
    step: Step,
    backend: Value,
    cache_bytes: Value,
    /// Seconds: ours on the device, ours as a call, softmax's.
    rounds: Vec<[f64; 3]>,
}

pub(super) fn beside(bench: &Bench, decoder: &CudaDecoder, child: &mut Child) -> Result<()> {
    let mut limits = child.ask(&json!({"do": "limits"}))?;
    limits["rounds"] = bench.subject.rounds.into();
    bench.line("torch", limits);
    let outcome = decode(bench, decoder, child);
    // Prompts are measured even if the steps failed.
    if let Err(error) = outcome {
        failed("beside", &error);
    }
    prefill(bench, decoder, child)
}

fn decode(bench: &Bench, decoder: &CudaDecoder, child: &mut Child) -> Result<()> {
    let (rows, lengths) = bench.subject.beside;
    let (mut pool, state) = pool(bench, decoder, rows)?;
    let mut cases = Vec::new();
    for &length in lengths {
        match child.ask(&json!({"do": "prepare", "length": length})) {
            Ok(answer) => {
                deepen(&mut pool, &state, length)?;
                let step = Step::new(bench, decoder, &mut pool, rows)?;
                let (backend, cache_bytes) = (answer["backend"].clone(), answer["cache_bytes"].clone());
                say(&format!("beside: {length} tokens: {answer}"));
                cases.push(Case { length, step, backend, cache_bytes, rounds: Vec::new() });
            }
            Err(error) => failed(&format!("beside, {length} tokens"), &error),
        }
    }
    'rounds: for round in 0..bench.subject.rounds {
        if round > 0 && bench.budget.is_spent() {
            break;
        }
        say(&format!("beside: round {} of {}", round + 1, bench.subject.rounds));
        for case in &mut cases {
            deepen(&mut pool, &state, case.length)?;
            let (device, call) = case.step.measure(decoder, &mut pool)?;
            match child.number(&json!({"do": "decode", "length": case.length}), "seconds") {
                Ok(softmax) => case.rounds.push([device, call, softmax]),
                Err(error) => {
                    failed(&format!("beside, {} tokens", case.length), &error);
                    if child.has_ended() {
                        break 'rounds;
                    }
                }
            }
        }
    }
    // Measurements before a failure count.
    for case in cases.into_iter().filter(|case| !case.rounds.is_empty()) {
        let of = |i: usize| Times::one(&case.rounds.iter().map(|round| round[i]).collect::<Vec<_>>()).ms();
        let ratios = Times::one(&case.rounds.iter().map(|[device, _, softmax]| softmax / device).collect::<Vec<_>>());
        let ([ms, least, most], [call_ms, ..], [softmax_ms, softmax_least, softmax_most]) = (of(0), of(1), of(2));
        bench.line(
            "beside",
            json!({"batch": rows, "length": case.length, "ms": ms, "least": least, "most": most, "call_ms": call_ms,
                "softmax_ms": softmax_ms, "softmax_least": softmax_least, "softmax_most": softmax_most,
                "ratio": ratios.median, "ratio_least": ratios.least, "ratio_most": ratios.most,
                "rounds": case.rounds.len(), "backend": case.backend, "cache_bytes": case.cache_bytes,
                "bytes": step_bytes(decoder, &pool, rows), "state_bytes": pool.state_bytes()}),
        );
    }
    Ok(())
}

fn prefill(bench: &Bench, decoder: &CudaDecoder, child: &mut Child) -> Result<()> {
    let tokens = bench.subject.prompt.0;
    let prompt = bench.subject.ids(0, tokens);
    let mut pool = decoder.new_pool(1, StateType::Bf16)?;
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 0..=bench.subject.rounds {
        pool.reset(0)?;
        wait(&mut pool)?;
        let read = |_| {
            decoder.prefill(&prompt, &mut pool, 0)?;
            Ok(wait(&mut pool)?)
        };
        let own = once(read, 1)?;
        let softmax = child.number(&json!({"do": "prefill"}), "seconds")?;
        if round > 0 {
            ours.push(own);
            theirs.push(softmax);
        }
    }
    let ratios: Vec<f64> = ours.iter().zip(&theirs).map(|(own, softmax)| softmax / own).collect();
    let (own, softmax, ratio) = (Times::one(&ours), Times::one(&theirs), Times::one(&ratios));
    bench.line(
        "beside prefill",
        json!({"tokens": tokens, "seconds": own.median, "softmax_seconds": softmax.median,
            "softmax_least": softmax.least, "softmax_most": softmax.most, "ratio": ratio.median,
            "ratio_least": ratio.least, "ratio_most": ratio.most, "rounds": ours.len()}),
    );
    Ok(())
}
