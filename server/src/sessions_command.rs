//! The command `sessions`: works on the stored sessions of each model, without a server or, if several servers share
//! them, while they run.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
#[cfg(feature = "postgres")]
use indicatif::ProgressBar;
#[cfg(feature = "postgres")]
use tidegate_server::session::PostgresUrl;
use tidegate_server::session::SystemDisk;
#[cfg(feature = "postgres")]
use tidegate_server::session::maintenance::Cluster;
use tidegate_server::session::maintenance::{self, Copied, Moved, Report};

use crate::cli::{PlaceArgs, SessionsArgs, SessionsCommand};
use crate::store::default_folder;
#[cfg(feature = "postgres")]
use crate::store::{index_url, objects};

/// The folder in a data folder that has all stores.
const SESSIONS: &str = "sessions";

/// Runs the command for each model that has sessions; returns whether nothing is wrong.
pub(crate) fn run(args: &SessionsArgs) -> Result<bool> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    if let Some(place) = args.command.shared() {
        return runtime.block_on(run_shared(place, &args.command));
    }
    let data = args.data_dir.clone().unwrap_or_else(default_folder);
    let stores = data.join(SESSIONS);
    let mut sound = true;
    match &args.command {
        SessionsCommand::Verify(_) => each(&stores, |folder, name| {
            sound &= report(name, &maintenance::check(folder)?);
            Ok(())
        })?,
        SessionsCommand::Repair => each(&stores, |folder, name| {
            sound &= report(name, &runtime.block_on(maintenance::repair(folder))?);
            Ok(())
        })?,
        SessionsCommand::Export { to, .. } => each(&stores, |folder, name| {
            sound &= moved("exported", name, &maintenance::export(folder, &to.join(name))?);
            Ok(())
        })?,
        SessionsCommand::Import { from, .. } => each(from, |folder, name| {
            let disk = Arc::new(SystemDisk);
            let imported = runtime.block_on(maintenance::import(disk, &stores.join(name), folder))?;
            sound &= moved("imported", name, &imported);
            Ok(())
        })?,
        SessionsCommand::Backup { to } => each(&stores, |folder, name| {
            let began = Instant::now();
            sound &= copied("backed up", name, began, &maintenance::backup(folder, &to.join(name))?);
            Ok(())
        })?,
        SessionsCommand::Restore { from } => each(from, |folder, name| {
            let began = Instant::now();
            sound &= copied("restored", name, began, &maintenance::restore(folder, &stores.join(name))?);
            Ok(())
        })?,
    }
    Ok(sound)
}

/// Runs the command for each model on the sessions that several servers share.
#[cfg(feature = "postgres")]
async fn run_shared(place: &PlaceArgs, command: &SessionsCommand) -> Result<bool> {
    let url = index_url(place)?;
    let url: PostgresUrl = url.parse().map_err(|error: String| anyhow::anyhow!("--index {error}"))?;
    let store = place.store.as_deref().context("--index needs --store")?;
    let models = match command {
        SessionsCommand::Import { from, .. } => folders(from)?.into_iter().map(|(_, name)| name).collect(),
        _ => maintenance::models(&url).await?,
    };
    ensure!(!models.is_empty(), "there are no sessions in {url}");
    let mut sound = true;
    for name in models {
        let cluster = Cluster::open(url.clone(), objects(store, &name)?, &name).await?;
        let done = run_on_model(&cluster, &name, command).await.with_context(|| format!("model {name}"));
        cluster.close().await?;
        sound &= done?;
    }
    Ok(sound)
}

#[cfg(feature = "postgres")]
async fn run_on_model(cluster: &Cluster, name: &str, command: &SessionsCommand) -> Result<bool> {
    // Only terminals show it.
    let bar = ProgressBar::new(0);
    let progress = |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    };
    Ok(match command {
        SessionsCommand::Export { to, .. } => {
            let done = cluster.export(&to.join(name), &progress).await?;
            bar.finish_and_clear();
            moved("exported", name, &done)
        }
        SessionsCommand::Import { from, .. } => {
            let done = cluster.import(&from.join(name), &progress).await?;
            bar.finish_and_clear();
            moved("imported", name, &done)
        }
        _ => {
            let found = cluster.verify(&progress).await?;
            bar.finish_and_clear();
            report(name, &found)
        }
    })
}

#[cfg(not(feature = "postgres"))]
#[expect(clippy::unused_async, reason = "so it is with the feature")]
async fn run_shared(_: &PlaceArgs, _: &SessionsCommand) -> Result<bool> {
    bail!("--index needs a program that was built with the feature `postgres`")
}

/// Calls `work` with the folder and name of each model in `parent`.
fn each(parent: &Path, mut work: impl FnMut(&Path, &str) -> Result<()>) -> Result<()> {
    for (folder, name) in folders(parent)? {
        work(&folder, &name).with_context(|| folder.display().to_string())?;
    }
    Ok(())
}

/// Returns the folders and names of the models in `parent`.
fn folders(parent: &Path) -> Result<Vec<(PathBuf, String)>> {
    let entries = std::fs::read_dir(parent).with_context(|| format!("cannot read {}", parent.display()))?;
    let mut folders: Vec<PathBuf> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    folders.retain(|folder| folder.is_dir());
    folders.sort();
    ensure!(!folders.is_empty(), "there are no sessions in {}", parent.display());
    let named = folders.into_iter().map(|folder| match folder.file_name().and_then(|name| name.to_str()) {
        Some(name) => Ok((folder.clone(), name.to_owned())),
        None => bail!("{} is not the folder of a model", folder.display()),
    });
    named.collect()
}

fn report(name: &str, report: &Report) -> bool {
    for line in &report.repaired {
        println!("repaired: {line}");
    }
    for line in &report.notes {
        println!("note: {line}");
    }
    for line in &report.problems {
        println!("problem: {line}");
    }
    let Report { sessions, snapshots, problems, .. } = report;
    println!("{name}: {sessions} sessions, {snapshots} snapshots, {} problems", problems.len());
    problems.is_empty()
}

fn moved(what: &str, name: &str, moved: &Moved) -> bool {
    for line in &moved.skipped {
        println!("left out: {line}");
    }
    println!("{name}: {what} {} sessions with {} snapshots", moved.sessions, moved.snapshots);
    moved.skipped.is_empty()
}

fn copied(what: &str, name: &str, began: Instant, copied: &Copied) -> bool {
    for version in &copied.missing {
        println!("problem: the snapshot of version {version} is missing");
    }
    println!(
        "{name}: {what} {} sessions with {} snapshots ({} copied, {} removed) in {:.1} s",
        copied.sessions,
        copied.snapshots,
        copied.copied,
        copied.removed,
        began.elapsed().as_secs_f64()
    );
    copied.missing.is_empty()
}
