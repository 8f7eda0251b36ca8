//! The branches of a conversation: the sessions forked from one another, and their versions.

use std::collections::{HashMap, HashSet};

use anyhow::{Result, bail};
use serde_json::Value;

use super::api::{Api, is_missing};

/// Maximum number of sessions to look at.
const MOST_SESSIONS: usize = 100;

/// Maximum number of characters shown of a version's text.
const MOST_CHARACTERS: usize = 40;

/// Number of characters shown of an id, after its prefix.
const SHORT: usize = 8;

/// Sessions that were forked from one another, and their versions, each after its parent.
#[derive(Debug, Default)]
pub(super) struct Family {
    pub(super) branches: Vec<Branch>,
    pub(super) versions: Vec<Version>,
}

/// A session of the family.
#[derive(Clone, Debug, Default)]
pub(super) struct Branch {
    pub(super) id: String,
    pub(super) name: Option<String>,
    pub(super) head: String,
}

/// A version, which may belong to several sessions.
#[derive(Clone, Debug, Default)]
pub(super) struct Version {
    pub(super) id: String,
    pub(super) parent: Option<String>,
    pub(super) tokens: u64,
    pub(super) label: Option<String>,
    /// The version's tags in the current session.
    pub(super) tags: Vec<String>,
    /// Whether the conversation can be rewound to this version.
    pub(super) kept: bool,
    /// The beginning of its text.
    pub(super) text: String,
}

impl Branch {
    fn new(session: &Value) -> Self {
        let name = session["metadata"]["name"].as_str().filter(|name| !name.is_empty());
        Self { id: text(&session["id"]), name: name.map(line), head: text(&session["version"]) }
    }

    /// Returns the branch's name, or the beginning of its id.
    pub(super) fn title(&self) -> &str {
        self.name.as_deref().unwrap_or_else(|| short(&self.id))
    }
}

impl Version {
    fn new(version: &Value) -> Self {
        Self {
            id: text(&version["version"]),
            parent: version["parent"].as_str().map(str::to_owned),
            tokens: version["tokens"].as_u64().unwrap_or(0),
            label: version["label"].as_str().map(line),
            tags: version["tags"].as_array().into_iter().flatten().map(text).collect(),
            kept: version["kept"] == true,
            text: String::new(),
        }
    }
}

impl Family {
    /// Loads the family of the session `id`.
    pub(super) async fn of(api: &Api, id: &str) -> Result<Self> {
        let current = api.get(&at(id)).await?;
        let mut sessions = vec![first(api, current.clone()).await?];
        let mut next = 0;
        while next < sessions.len() && sessions.len() < MOST_SESSIONS {
            let forks = forks(api, &text(&sessions[next]["id"])).await?;
            sessions.extend(forks);
            next += 1;
        }
        sessions.truncate(MOST_SESSIONS);
        if sessions.iter().all(|session| session["id"] != current["id"]) {
            sessions.push(current);
        }
        let (mut family, mut places, mut listed_by) = (Self::default(), HashMap::new(), Vec::new());
        for session in &sessions {
            let branch = Branch::new(session);
            let turns = api.get(&format!("{}/turns", at(&branch.id))).await?;
            for turn in turns["data"].as_array().into_iter().flatten() {
                let version = Version::new(turn);
                let place = *places.entry(version.id.clone()).or_insert(family.versions.len());
                if place == family.versions.len() {
                    family.versions.push(Version { tags: Vec::new(), ..version.clone() });
                    listed_by.push(branch.id.clone());
                }
                // It is enough if one session keeps the version, but tags belong to a single session.
                family.versions[place].kept |= version.kept;
                if branch.id == id {
                    family.versions[place].tags = version.tags;
                }
            }
            family.branches.push(branch);
        }
        family.read_texts(api, &listed_by).await?;
        Ok(family)
    }

    /// Reads the text of each version. For each version, `listed_by` has a session that lists it. It is enough to read
    /// the texts of the leaves, because every version is an ancestor of a leaf or a leaf itself.
    async fn read_texts(&mut self, api: &Api, listed_by: &[String]) -> Result<()> {
        let continued: HashSet<&str> = self.versions.iter().filter_map(|version| version.parent.as_deref()).collect();
        let ends = self.versions.iter().zip(listed_by).filter(|(version, _)| !continued.contains(version.id.as_str()));
        let mut known = HashMap::new();
        for (end, session) in ends.take(MOST_SESSIONS) {
            known.extend(texts(api, session, &end.id).await?);
        }
        for version in &mut self.versions {
            version.text = known.remove(&version.id).unwrap_or_default();
        }
        Ok(())
    }

    /// Returns the id of the version that starts with `given`.
    pub(super) fn version(&self, given: &str) -> Result<&str> {
        one("version", given, self.versions.iter().map(|version| version.id.as_str()))
    }

    /// Returns the id of the branch with this name, or with an id that starts with `given`.
    pub(super) fn branch(&self, given: &str) -> Result<&str> {
        let mut named = self.branches.iter().filter(|branch| branch.name.as_deref() == Some(given));
        if let (Some(branch), None) = (named.next(), named.next()) {
            return Ok(&branch.id);
        }
        one("branch", given, self.branches.iter().map(|branch| branch.id.as_str()))
    }
}

/// Returns the only id that starts with `given`, which may omit the prefix.
fn one<'a>(what: &str, given: &str, ids: impl Iterator<Item = &'a str>) -> Result<&'a str> {
    let digits = |id: &'a str| id.split_once('_').map_or(id, |(_, digits)| digits);
    let mut found = ids.filter(|&id| id.starts_with(given) || digits(id).starts_with(given));
    match (found.next(), found.next()) {
        (Some(id), None) => Ok(id),
        (None, _) => bail!("there is no {what} `{given}`; /tree lists them"),
        _ => bail!("several of the tree's {what} ids begin with `{given}`; give more of it"),
    }
}

/// Returns the API path of a session.
pub(super) fn at(id: &str) -> String {
    format!("/v1/sessions/{id}")
}

/// Returns the beginning of an id.
pub(super) fn short(id: &str) -> &str {
    let start = id.find('_').map_or(0, |kind| kind + 1);
    id.get(start..start + SHORT).unwrap_or(id)
}

/// Returns the session from which this one and its relatives were forked, as far back as they still exist.
async fn first(api: &Api, mut session: Value) -> Result<Value> {
    while let Some(parent) = session["forked_from"]["session"].as_str() {
        match api.get(&at(parent)).await {
            Ok(parent) => session = parent,
            Err(error) if is_missing(&error) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(session)
}

/// Returns the sessions forked from this one, oldest first.
async fn forks(api: &Api, id: &str) -> Result<Vec<Value>> {
    let (mut forks, mut after) = (Vec::new(), String::new());
    while forks.len() < MOST_SESSIONS {
        let page = api.get(&format!("/v1/sessions?forked_from={id}&order=asc&limit=100{after}")).await?;
        forks.extend(page["data"].as_array().into_iter().flatten().cloned());
        match page["next"].as_str() {
            Some(next) => after = format!("&after={next}"),
            None => break,
        }
    }
    Ok(forks)
}

/// Returns the text of a version and of each of its ancestors, as far as it is kept.
async fn texts(api: &Api, session: &str, version: &str) -> Result<HashMap<String, String>> {
    let messages = match api.get(&format!("{}/messages?version={version}", at(session))).await {
        Ok(messages) => messages,
        Err(error) if is_missing(&error) => return Ok(HashMap::new()),
        Err(error) => return Err(error),
    };
    let mut texts = HashMap::new();
    let messages = messages["data"].as_array().map_or(&[][..], Vec::as_slice);
    // User messages tell versions apart better than instructions or answers do.
    let (said, others): (Vec<&Value>, Vec<&Value>) = messages.iter().partition(|message| message["role"] == "user");
    for message in said.into_iter().chain(others) {
        texts.entry(text(&message["version"])).or_insert_with(|| line(message["content"].as_str().unwrap_or_default()));
    }
    Ok(texts)
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Returns the beginning of a text on one line, without control characters, on which a terminal would act.
fn line(text: &str) -> String {
    let words: Vec<&str> =
        text.split(|c: char| c.is_whitespace() || c.is_control()).filter(|it| !it.is_empty()).collect();
    let words = words.join(" ");
    match words.char_indices().nth(MOST_CHARACTERS) {
        Some((end, _)) => format!("{}…", &words[..end]),
        None => words,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_found_by_their_beginning_and_branches_by_their_name() {
        let branch =
            |id: &str, name: Option<&str>| Branch { id: id.into(), name: name.map(Into::into), ..Branch::default() };
        let version = |id: &str| Version { id: id.into(), ..Version::default() };
        let family = Family {
            branches: vec![branch("ses_12ab", None), branch("ses_34cd", Some("night")), branch("ses_12ff", Some("1"))],
            versions: vec![version("ver_a1"), version("ver_b2")],
        };
        assert_eq!(family.version("a").unwrap(), "ver_a1");
        assert_eq!(family.version("ver_b2").unwrap(), "ver_b2");
        assert!(family.version("c").unwrap_err().to_string().contains("there is no version `c`"));
        assert!(family.version("ver_").unwrap_err().to_string().contains("several"));
        assert_eq!(family.branch("night").unwrap(), "ses_34cd");
        assert_eq!(family.branch("12a").unwrap(), "ses_12ab");
        assert_eq!(family.branch("1").unwrap(), "ses_12ff", "a name comes first");
        assert!(family.branch("12").is_err());
    }

    #[test]
    fn a_text_is_shown_on_one_short_line_that_no_terminal_acts_on() {
        assert_eq!(line(" a\n\tfox\u{1b}[2J "), "a fox [2J");
        let long = line(&"é".repeat(60));
        assert_eq!((long.chars().count(), long.ends_with('…')), (41, true));
        assert_eq!((short("ver_0123456789"), short("ver_1")), ("01234567", "ver_1"));
    }
}
