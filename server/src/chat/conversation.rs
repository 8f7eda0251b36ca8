//! The conversation: its turns, and what the commands do to it. It is a session of the API.

use std::fs::{File, remove_file};
use std::io::{ErrorKind, Read, Write, stdout};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use tidegate_server::session::SessionId;
use tokio::signal::unix::Signal;

use super::api::Refused;
use super::family::{Family, at, short};
use super::local::{Local, Reading};
use super::tree;
use super::turn::{self, Answer};
use crate::cli::ChatArgs;

/// Maximum number of turns that a rewind can go back.
const MOST_TURNS: usize = 999;

/// A conversation. Nothing is stored before its first turn.
pub(super) struct Conversation<'a> {
    local: &'a Local,
    args: &'a ChatArgs,
    /// The id of the current session, if there is one yet.
    id: Option<String>,
    /// Whether the model ended the last answer by itself.
    is_complete: bool,
}

impl<'a> Conversation<'a> {
    /// Opens the conversation that `--session` names, or a new one.
    pub(super) async fn open(local: &'a Local, args: &'a ChatArgs) -> Result<Self> {
        if let Some(id) = &args.session {
            // The id becomes part of API paths.
            ensure!(SessionId::parse(id).is_some(), "--session {id}: an id is `ses_` and 32 hexadecimal digits");
            local.api.get(&at(id)).await.with_context(|| format!("--session {id}"))?;
        }
        Ok(Self { local, args, id: args.session.clone(), is_complete: false })
    }

    /// Returns the id of the session, if there is one yet.
    pub(super) fn id(&self) -> Option<&str> {
        self.id.as_deref()
    }

    fn begun(&self) -> Result<&str> {
        self.id().context("the conversation has not begun yet")
    }

    async fn session(&self) -> Result<Value> {
        self.local.api.get(&at(self.begun()?)).await
    }

    /// Describes the current version in words.
    pub(super) async fn place(&self) -> Result<String> {
        let session = self.session().await?;
        Ok(format!("version {}, {} tokens", short(session["version"].as_str().unwrap_or_default()), session["tokens"]))
    }

    /// Runs a turn with `text`, which starts the conversation if there is none.
    pub(super) async fn say(&mut self, text: &str, interrupts: &mut Signal) -> Result<Answer> {
        let id = match &self.id {
            Some(id) => id.clone(),
            None => self.begin().await?,
        };
        let answer = self.answer(&id, Some(text), interrupts).await;
        if self.id.is_none() {
            match &answer {
                Ok(_) => self.id = Some(id),
                // Nothing was said in this session.
                Err(_) => self.local.api.delete(&at(&id)).await?,
            }
        }
        answer
    }

    /// Creates a session and returns its id.
    async fn begin(&self) -> Result<String> {
        let mut new = json!({});
        if let Some(seed) = self.args.sampling.seed {
            new["seed"] = seed.into();
        }
        id_of(&self.local.api.post("/v1/sessions", &new).await?)
    }

    /// Continues an answer that was cut off.
    pub(super) async fn more(&mut self, interrupts: &mut Signal) -> Result<Answer> {
        ensure!(!self.is_complete, "the last answer has ended by itself; write something new");
        let id = self.begun()?.to_owned();
        self.answer(&id, None, interrupts).await.map_err(|error| {
            if error.is::<Refused>() { error.context("there is no answer that was cut off") } else { error }
        })
    }

    /// Generates an answer to `text`, or the rest of the last answer.
    async fn answer(&mut self, id: &str, text: Option<&str>, interrupts: &mut Signal) -> Result<Answer> {
        let given = &self.args.sampling;
        // A null field counts as absent.
        let mut body = json!({
            "session": id,
            "stream": true,
            // Keeps an answer that Ctrl-C ends.
            "on_disconnect": "continue",
            "max_tokens": given.max_tokens,
            "temperature": given.temperature,
            "top_p": given.top_p,
            "top_k": given.top_k,
            "min_p": given.min_p,
            "typical_p": given.typical_p,
            "repetition_penalty": given.repetition_penalty,
            "frequency_penalty": given.frequency_penalty,
            "presence_penalty": given.presence_penalty,
            "stop": given.stop,
            "ignore_eos": given.ignore_eos,
        });
        let path = if self.local.reading == Reading::Messages {
            body["messages"] = self.messages(id, text).await?;
            "/v1/chat/completions"
        } else {
            body["prompt"] = text.into();
            "/v1/completions"
        };
        let answer = turn::take(&self.local.api, path, &body, interrupts, &mut stdout()).await?;
        self.is_complete = answer.is_complete;
        Ok(answer)
    }

    /// Returns the new messages; at the start of the conversation, the instructions come first.
    async fn messages(&self, id: &str, text: Option<&str>) -> Result<Value> {
        let mut messages = Vec::new();
        if let Some(system) = &self.args.system
            && self.local.api.get(&at(id)).await?["tokens"] == 0
        {
            messages.push(json!({"role": "system", "content": system}));
        }
        messages.extend(text.map(|text| json!({"role": "user", "content": text})));
        Ok(messages.into())
    }

    /// Switches to a new branch.
    pub(super) async fn fork(&mut self, name: Option<&str>) -> Result<()> {
        let session = self.session().await?;
        let mut fork = json!({});
        if let Some(name) = name {
            fork["metadata"] = session["metadata"].clone();
            fork["metadata"]["name"] = name.into();
        }
        let forks = self.local.api.post(&format!("{}/fork", at(self.begun()?)), &fork).await?;
        self.id = Some(id_of(&forks["data"][0])?);
        Ok(())
    }

    /// Switches to another branch of the tree.
    pub(super) async fn switch(&mut self, to: &str) -> Result<()> {
        let family = Family::of(&self.local.api, self.begun()?).await?;
        self.id = Some(family.branch(to)?.to_owned());
        self.is_complete = false;
        Ok(())
    }

    /// Returns a drawing of the tree of branches.
    pub(super) async fn tree(&self) -> Result<String> {
        let family = Family::of(&self.local.api, self.begun()?).await?;
        let session = self.session().await?;
        Ok(tree::draw(&family, session["version"].as_str().unwrap_or_default()))
    }

    /// Rewinds to a version: a number of turns back, a tag, or a version id shown in the tree.
    pub(super) async fn rewind(&mut self, to: Option<&str>) -> Result<()> {
        let session = self.session().await?;
        let to = to.unwrap_or("1");
        let version = if !session["tags"][to].is_null() {
            to.to_owned()
        } else if let Some(turns) = turns(to) {
            self.back(turns).await?
        } else {
            Family::of(&self.local.api, self.begun()?).await?.version(to)?.to_owned()
        };
        let path = format!("{}/rewind", at(self.begun()?));
        let rewound = self.local.api.post(&path, &json!({"version": version})).await;
        rewound
            .with_context(|| format!("cannot go back to {version}, which may be no longer kept (--keep-versions)"))?;
        self.is_complete = false;
        Ok(())
    }

    /// Returns the version that is `turns` turns before the current one.
    async fn back(&self, turns: usize) -> Result<String> {
        ensure!((1..=MOST_TURNS).contains(&turns), "the number of turns must be from 1 to {MOST_TURNS}, found {turns}");
        let path = format!("{}/lineage?limit={}", at(self.begun()?), turns + 1);
        let lineage = self.local.api.get(&path).await?;
        let versions = lineage["data"].as_array().map_or(&[][..], Vec::as_slice);
        match versions.get(turns).and_then(|version| version["version"].as_str()) {
            Some(version) => Ok(version.to_owned()),
            None => bail!("there are only {} turns to go back", versions.len().saturating_sub(1)),
        }
    }

    /// Writes the conversation to a new file, and returns its size.
    pub(super) async fn save(&self, file: &str) -> Result<usize> {
        let bytes = self.local.api.download(&format!("{}/snapshot", at(self.begun()?))).await?;
        let mut out = File::create_new(file).map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists => anyhow::anyhow!("{file} exists already; it is not overwritten"),
            _ => anyhow::Error::from(error).context(format!("cannot create {file}")),
        })?;
        if let Err(error) = out.write_all(&bytes).and_then(|()| out.sync_all()) {
            // A partial file is useless. The first error is the one to report.
            let _ = remove_file(file);
            return Err(error).with_context(|| format!("cannot write {file}"));
        }
        Ok(bytes.len())
    }

    /// Switches to a new conversation that starts where the one in a file ends.
    pub(super) async fn load(&mut self, file: &str) -> Result<()> {
        let (mut bytes, most) = (Vec::new(), self.local.largest_file);
        let read = File::open(file).and_then(|it| it.take(most as u64 + 1).read_to_end(&mut bytes));
        read.with_context(|| format!("cannot read {file}"))?;
        ensure!(
            bytes.len() <= most,
            "{file} is no conversation with this model, whose files have at most {most} bytes"
        );
        let session = self.local.api.upload("/v1/snapshots", bytes).await.with_context(|| file.to_owned())?;
        self.id = Some(id_of(&session)?);
        self.is_complete = false;
        Ok(())
    }
}

fn id_of(session: &Value) -> Result<String> {
    Ok(session["id"].as_str().context("the answer has no session")?.to_owned())
}

/// Parses a number of turns. A longer number is the start of a version id.
fn turns(text: &str) -> Option<usize> {
    text.parse().ok().filter(|_| text.len() < 8)
}
