//! The command `chat`: a conversation in the terminal, kept as a session. It calls the API of its own process, so that
//! the same rules apply as with a server.

mod api;
mod command;
mod conversation;
mod family;
mod local;
mod tree;
mod turn;

use std::io::{self, IsTerminal, Write, stdin, stdout};

use anyhow::{Context, Result, anyhow};
use tidegate_model::StateType;
use tidegate_server::checkpoint::Files;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use self::command::{HELP, Line};
use self::conversation::Conversation;
use self::local::{Local, Reading};
use self::turn::Answer;
use crate::cli::ChatArgs;
use crate::generate::is_broken_pipe;

/// Runs a conversation with the model in `files` until the input ends; `name` is the model's name, if it has its own.
/// Returns false if a line from a pipe failed.
pub(crate) fn run(args: &ChatArgs, files: Files, name: Option<String>) -> Result<bool> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let local = Local::open(args, files, name).await?;
        let outcome = talk(args, &local).await;
        local.close().await;
        match outcome {
            // The reader closed the pipe on purpose, as `head` does.
            Err(error) if is_broken_pipe(&error) => Ok(true),
            outcome => outcome,
        }
    })
}

async fn talk(args: &ChatArgs, local: &Local) -> Result<bool> {
    let mut conversation = Conversation::open(local, args).await?;
    let is_terminal = stdin().is_terminal();
    introduce(local, is_terminal);
    if is_terminal && conversation.id().is_some() {
        note(&format!("continuing at {}", conversation.place().await?));
    }
    let mut interrupts = signal(SignalKind::interrupt()).context("cannot listen for signals")?;
    let (mut lines, mut sound) = (lines(), true);
    loop {
        if is_terminal {
            eprint!("> ");
        }
        let line = tokio::select! {
            line = lines.recv() => line,
            _ = interrupts.recv() => None,
        };
        let Some(line) = line.transpose().context("standard input")? else { break };
        match follow(&line, &mut conversation, &mut interrupts).await {
            Ok(Outcome::Answered(Answer { interrupts: 0, is_complete })) => {
                if is_terminal && !is_complete {
                    note("(cut off by --max-tokens; /more continues)");
                }
            }
            Ok(Outcome::Answered(Answer { interrupts: 1, .. })) if is_terminal => note("(stopped; /more continues)"),
            // From a pipe: nobody would see the answers to the other lines.
            Ok(Outcome::Answered(_) | Outcome::End) => break,
            Ok(Outcome::Done) => {}
            Err(error) if is_broken_pipe(&error) => return Err(error),
            Err(error) => {
                eprintln!("error: {error:#}");
                sound = false;
            }
        }
    }
    if is_terminal {
        eprintln!();
    }
    if let Some(id) = conversation.id().filter(|_| local.keeps) {
        note(&format!("kept as {id}; to continue: {}", continuing(id, args)));
    }
    Ok(sound || is_terminal)
}

/// The result of a line.
enum Outcome {
    Done,
    Answered(Answer),
    End,
}

/// Executes a line.
async fn follow(line: &str, conversation: &mut Conversation<'_>, interrupts: &mut Signal) -> Result<Outcome> {
    match command::parse(line).map_err(|error| anyhow!(error))? {
        Line::Empty => {}
        Line::Exit => return Ok(Outcome::End),
        Line::Message(text) => return conversation.say(text, interrupts).await.map(Outcome::Answered),
        Line::More => return conversation.more(interrupts).await.map(Outcome::Answered),
        Line::Fork(name) => {
            conversation.fork(name).await?;
            note(&format!("now in branch {}", conversation.id().unwrap_or_default()));
        }
        Line::Switch(to) => {
            conversation.switch(to).await?;
            note(&format!("now in branch {}, {}", conversation.id().unwrap_or_default(), conversation.place().await?));
        }
        Line::Rewind(to) => {
            conversation.rewind(to).await?;
            note(&format!("now at {}", conversation.place().await?));
        }
        Line::Save(file) => note(&format!("wrote {} bytes to {file}", conversation.save(file).await?)),
        Line::Load(file) => {
            conversation.load(file).await?;
            note(&format!("now in {}, {}", conversation.id().unwrap_or_default(), conversation.place().await?));
        }
        Line::Tree => print(&conversation.tree().await?)?,
        Line::Help => print(HELP)?,
    }
    Ok(Outcome::Done)
}

/// Says which model answers and, on a terminal, how to use the chat.
fn introduce(local: &Local, is_terminal: bool) {
    let name = &local.name;
    match local.reading {
        Reading::Messages if is_terminal => note(name),
        Reading::Messages => {}
        Reading::Text => note(&format!(
            "{name} has no chat template: it continues the text, to which each line is added as it is typed, spaces included"
        )),
        Reading::Source => note(&format!("{name} translates: each line is a new text")),
    }
    if is_terminal {
        note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D ends");
    }
}

/// Returns the command that continues a conversation.
fn continuing(id: &str, args: &ChatArgs) -> String {
    let mut command = format!("tidegate chat --session {id}");
    for (flag, path) in [("--model", args.model.model.first()), ("--data-dir", args.sessions.data_dir.as_ref())] {
        if let Some(path) = path {
            command.extend([" ", flag, " ", &quoted(&path.display().to_string())]);
        }
    }
    if StateType::from(args.model.state) == StateType::Bf16 {
        command.push_str(" --state bf16");
    }
    command
}

/// Quotes a word for a shell, if necessary.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+=:@%,".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Returns the lines of standard input. A thread reads them, so that signals are handled meanwhile.
fn lines() -> mpsc::Receiver<io::Result<String>> {
    let (sender, receiver) = mpsc::channel(1);
    std::thread::spawn(move || {
        for line in stdin().lines() {
            let is_last = line.is_err();
            if sender.blocking_send(line).is_err() || is_last {
                return;
            }
        }
    });
    receiver
}

/// Prints a note to standard error, because it is not part of the conversation.
fn note(text: &str) {
    eprintln!("{text}");
}

fn print(text: &str) -> Result<()> {
    let mut out = stdout();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_quoted_for_a_shell_where_it_must_be() {
        assert_eq!(quoted("/a/b-c.d"), "/a/b-c.d");
        assert_eq!(quoted("/my data"), "'/my data'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted(""), "''");
    }
}
