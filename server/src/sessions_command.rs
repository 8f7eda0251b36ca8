//! The command `sessions`: work on the stored sessions of each model, without a server.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use tidegate_server::session::SystemDisk;
use tidegate_server::session::maintenance::{self, Copied, Moved, Report};

use crate::cli::{SessionsArgs, SessionsCommand};
use crate::store::default_folder;

/// The folder of all stores in a data folder.
const SESSIONS: &str = "sessions";

/// Runs the command for each model that has sessions; returns whether nothing is wrong.
pub(crate) fn run(args: &SessionsArgs) -> Result<bool> {
    let data = args.data_dir.clone().unwrap_or_else(default_folder);
    let stores = data.join(SESSIONS);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut sound = true;
    match &args.command {
        SessionsCommand::Check => each(&stores, |folder, name| {
            sound &= report(name, &maintenance::check(folder)?);
            Ok(())
        })?,
        SessionsCommand::Repair => each(&stores, |folder, name| {
            sound &= report(name, &runtime.block_on(maintenance::repair(folder))?);
            Ok(())
        })?,
        SessionsCommand::Export { to } => each(&stores, |folder, name| {
            sound &= moved("exported", name, &maintenance::export(folder, &to.join(name))?);
            Ok(())
        })?,
        SessionsCommand::Import { from } => each(from, |folder, name| {
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

/// Calls `work` with each model's folder in `parent`, and its name.
fn each(parent: &Path, mut work: impl FnMut(&Path, &str) -> Result<()>) -> Result<()> {
    let entries = std::fs::read_dir(parent).with_context(|| format!("cannot read {}", parent.display()))?;
    let mut folders: Vec<PathBuf> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    folders.retain(|folder| folder.is_dir());
    folders.sort();
    ensure!(!folders.is_empty(), "there are no sessions in {}", parent.display());
    for folder in folders {
        let Some(name) = folder.file_name().and_then(|name| name.to_str()) else {
            bail!("{} is not the folder of a model", folder.display());
        };
        work(&folder, name).with_context(|| folder.display().to_string())?;
    }
    Ok(())
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
