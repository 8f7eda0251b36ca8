//! The command `generate`: continues a prompt in the terminal.

use std::io::{Read, Write};

use anyhow::{Context, Result, bail};
use rand::Rng;
use tidegate_server::checkpoint::{self, Files, OpenOptions};
use tidegate_server::engine::{Event, EventStream, Finish, Request, RequestParameters};

use crate::cli::GenerateArgs;

/// Returns the text to continue. A line feed at the end of standard input ends the last line, and is not part of the
/// text.
fn prompt(given: String) -> Result<String> {
    if given != "-" {
        return Ok(given);
    }
    let mut text = String::new();
    std::io::stdin().lock().read_to_string(&mut text).context("the prompt on standard input")?;
    if text.ends_with('\n') {
        text.pop();
    }
    Ok(text)
}

/// Continues the prompt with the model in `files`.
pub(crate) fn generate(args: GenerateArgs, files: Files) -> Result<()> {
    let text = prompt(args.prompt)?;
    let (backend, device, state) = (args.model.backend, args.model.device, args.model.state.into());
    let Files { path, vocabulary } = files;
    let options = OpenOptions { vocabulary, backend, device, slots: 1, state, ..OpenOptions::default() };
    let (served, _engine) = checkpoint::open(&path, &options)?;
    let given = args.sampling;
    let mut sampling = given.over(&served.sampling);
    let seed = given.seed.unwrap_or_else(|| rand::rng().random());
    sampling.seed = seed;
    let parameters = RequestParameters {
        prompt: served.tokenizer.encode(&text)?,
        max_tokens: given.max_tokens,
        stop: given.stop,
        sampling,
        ignore_eos: given.ignore_eos,
        ..RequestParameters::default()
    };
    let events = served.engine.submit(Request::new(parameters, &served.limits)?)?;
    // A translation does not repeat its source.
    let before = if served.limits.sources.is_some() { "" } else { text.as_str() };
    let finish = match print(before, events) {
        // The reader closed the pipe on purpose, as `head` does.
        Err(error) if is_broken_pipe(&error) => return Ok(()),
        finish => finish?,
    };
    let (prompt, answer) = (finish.prompt_tokens, finish.completion_tokens);
    let first = finish.timings.prefill.as_secs_f64() * 1e3;
    // Prefill yields the first token.
    let rate = (answer - 1) as f64 / finish.timings.decode.as_secs_f64().max(1e-9);
    eprintln!(
        "prompt: {prompt} tokens in {first:.0} ms; generated: {answer} tokens at {rate:.1} tokens/s; seed {seed}"
    );
    Ok(())
}

/// Prints `before`, then the generated text as it arrives.
fn print(before: &str, mut events: EventStream) -> Result<Finish> {
    let mut out = std::io::stdout().lock();
    write!(out, "{before}")?;
    out.flush()?;
    while let Some(event) = events.blocking_next() {
        match event {
            Event::PromptLogprobs(_) => {}
            Event::Delta(delta) => {
                write!(out, "{}", delta.text)?;
                out.flush()?;
            }
            Event::Finished(finish) => {
                writeln!(out)?;
                return Ok(finish);
            }
            Event::Failed(failure) => bail!(failure),
        }
    }
    bail!("the engine stopped")
}

/// Returns whether nobody reads the output any more.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}
