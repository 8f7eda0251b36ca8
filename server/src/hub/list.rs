//! Lists the models in the cache, with their sizes and whether they can be served.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Result as IoResult, Write};
use std::path::Path;

use serde::Serialize;
use tidegate_server::checkpoint;

use super::cache::{Repo, files};
use super::choose::{CONFIG, is_vocabulary, single_tensors, whole_models};
use super::error::HubError;
use super::fetch::{NATIVE_HEAD, complete, reason};
use super::name::Commit;
use super::progress::size;
use super::settings::Settings;

/// Number of digits of a commit that a table shows.
const SHORT: usize = 12;

/// A model in the cache.
#[derive(Debug, Serialize)]
struct Row {
    /// The name that `--model` takes, without the revision.
    name: String,
    /// The branches and tags of its commit.
    revisions: Vec<String>,
    commit: String,
    /// Size in bytes.
    size: u64,
    served: bool,
    /// Why the model cannot be served.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

/// Prints the models in the cache: a table, or one JSON object per line.
pub(crate) fn print_models(settings: &Settings, json: bool, out: &mut impl Write) -> anyhow::Result<()> {
    let rows = rows(&settings.cache)?;
    if json {
        for row in &rows {
            writeln!(out, "{}", serde_json::to_string(row)?)?;
        }
    } else if rows.is_empty() {
        writeln!(out, "there are no models in {}", settings.cache.display())?;
    } else {
        table(&rows, out)?;
    }
    Ok(())
}

fn table(rows: &[Row], out: &mut impl Write) -> IoResult<()> {
    let head = ["NAME", "REVISION", "SIZE", "SERVED"].map(ToOwned::to_owned);
    let cells = rows.iter().map(|row| {
        let revision = if row.revisions.is_empty() { row.commit[..SHORT].into() } else { row.revisions.join(",") };
        let served = row.reason.as_ref().map_or_else(|| "yes".into(), |reason| format!("no: {reason}"));
        [row.name.clone(), revision, size(row.size), served]
    });
    let lines: Vec<[String; 4]> = [head].into_iter().chain(cells).collect();
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or_default();
    let widths = [0, 1, 2].map(width);
    for [name, revision, size, served] in &lines {
        let [first, second, third] = widths;
        writeln!(out, "{name:first$}  {revision:second$}  {size:>third$}  {served}")?;
    }
    Ok(())
}

fn rows(cache: &Path) -> Result<Vec<Row>, HubError> {
    let mut rows = Vec::new();
    for (name, repo) in Repo::all(cache)? {
        let mut revisions: BTreeMap<Commit, Vec<String>> = BTreeMap::new();
        for (revision, commit) in repo.revisions() {
            revisions.entry(commit).or_default().push(revision);
        }
        for commit in repo.commits() {
            let (snapshot, revisions) = (repo.snapshot(&commit), revisions.remove(&commit).unwrap_or_default());
            rows.extend(models(&snapshot, &name).into_iter().map(|(name, size, served)| Row {
                name,
                revisions: revisions.clone(),
                commit: commit.text().into(),
                size,
                served: served.is_ok(),
                reason: served.err(),
            }));
        }
    }
    Ok(rows)
}

/// Returns the models of a snapshot with their sizes: its folder, or else each file that holds a whole model.
fn models(snapshot: &Path, name: &str) -> Vec<(String, u64, Result<(), String>)> {
    let there = files(snapshot);
    let bytes = |file: &str| fs::metadata(snapshot.join(file)).map_or(0, |about| about.len());
    let folder = complete(snapshot, None).is_ok_and(|path| path == snapshot);
    let mut models = Vec::new();
    if !folder {
        let tensors = single_tensors(&there).filter(|file| is_native(&snapshot.join(file)));
        for file in whole_models(&there).chain(tensors) {
            models.push((format!("{name}:{file}"), bytes(file), served(&snapshot.join(file))));
        }
    }
    if models.is_empty() {
        let config = fs::read_to_string(snapshot.join(CONFIG)).unwrap_or_default();
        let reason = checkpoint::refused_config(&config).filter(|_| !config.is_empty());
        let served = if !there.is_empty() && there.iter().all(|file| is_vocabulary(file)) {
            Err("it is RWKV's vocabulary alone, which .pth files of other models use".into())
        } else {
            reason.map_or_else(|| complete(snapshot, None).and_then(|path| served(&path)), Err)
        };
        models.push((name.into(), there.iter().map(|file| bytes(file)).sum(), served));
    }
    models
}

/// Returns whether a safetensors file begins as RWKV-7 of its author does.
fn is_native(path: &Path) -> bool {
    let mut head = Vec::new();
    let read = fs::File::open(path).and_then(|file| file.take(NATIVE_HEAD).read_to_end(&mut head));
    read.is_ok() && checkpoint::refused_native(&path.to_string_lossy(), &head).is_none()
}

fn served(path: &Path) -> Result<(), String> {
    checkpoint::check(path).map_err(|error| reason(&error, path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rwkv_7_in_safetensors_is_listed_by_its_file() {
        const RWKV: &str = "\x20\0\0\0\0\0\0\0{\"blocks.0.att.r_k\":{}}          ";
        const OTHER: &str = "\x20\0\0\0\0\0\0\0{\"conv_in.weight\":{}}            ";
        for (files, expected) in [
            (&[("a.safetensors", RWKV), ("b.safetensors", OTHER)][..], &["org/x:a.safetensors"][..]),
            (&[("a.pth", "x"), ("a.safetensors", RWKV)], &["org/x:a.pth", "org/x:a.safetensors"]),
            (&[("b.safetensors", OTHER)], &["org/x"]),
            (&[("config.json", "{}"), ("a.safetensors", RWKV)], &["org/x"]),
        ] {
            let snapshot = tempfile::tempdir().unwrap();
            for (file, contents) in files {
                fs::write(snapshot.path().join(file), contents).unwrap();
            }
            let names: Vec<String> = models(snapshot.path(), "org/x").into_iter().map(|(name, ..)| name).collect();
            assert_eq!(names, expected);
        }
    }
}
