//! One turn: shows the answer as it is generated; Ctrl-C ends it.

use std::io::Write;

use anyhow::{Result, bail};
use serde_json::Value;
use tokio::signal::unix::Signal;

use super::api::Api;

/// An answer that has been shown and stored.
#[derive(Debug, Default)]
pub(super) struct Answer {
    /// Whether the model ended the answer by itself.
    pub(super) is_complete: bool,
    /// How many times Ctrl-C was pressed during the answer.
    pub(super) interrupts: usize,
}

/// Runs the turn that `body` requests, and writes its answer to `out`. The first Ctrl-C ends the answer, which is kept
/// as far as it was shown. The third one stops waiting for that.
pub(super) async fn take(
    api: &Api,
    path: &str,
    body: &Value,
    interrupts: &mut Signal,
    out: &mut impl Write,
) -> Result<Answer> {
    let mut events = api.stream(path, body).await?;
    let (mut answer, mut ends_line) = (Answer::default(), true);
    loop {
        let event = tokio::select! {
            event = events.next() => event?,
            _ = interrupts.recv() => {
                answer.interrupts += 1;
                match answer.interrupts {
                    1 => api.delete(&events.path).await?,
                    2 => {}
                    _ => bail!("the answer was not ended in time; the conversation is as it was before it"),
                }
                continue;
            }
        };
        let Some(event) = event else { break };
        if let Some(message) = event["error"]["message"].as_str() {
            if !ends_line {
                writeln!(out)?;
            }
            bail!("{message}; the conversation is as it was before this answer");
        }
        let choice = &event["choices"][0];
        let text = choice["delta"]["content"].as_str().or_else(|| choice["text"].as_str()).unwrap_or_default();
        if !text.is_empty() {
            out.write_all(text.as_bytes())?;
            out.flush()?;
            ends_line = text.ends_with('\n');
        }
        answer.is_complete |= choice["finish_reason"] == "stop";
    }
    if !ends_line {
        writeln!(out)?;
    }
    if answer.interrupts == 0 {
        // Nobody resumes the stream, so its events need not be kept.
        api.delete(&events.path).await?;
    }
    Ok(answer)
}
