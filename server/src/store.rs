//! Opens the data folder, the secret and the session store that the command line names.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use object_store::ObjectStore;
use object_store::prefix::PrefixStore;
use tidegate_server::Served;
use tidegate_server::checkpoint::sessions_folder;
use tidegate_server::ram::{RamSplit, SharedRam};
use tidegate_server::session::{Durability, Location, Store, StoreOptions, StoreStats, folder_objects, objects_at};
use tracing::{info, warn};
use url::Url;

use crate::cli::{Budget, DurabilityArg, PlaceArgs, SecretUrl, SessionArgs, Switch};

/// Creates the data folder and checks that it is writable, so that a mistake shows now and not later as a lost session.
/// A folder given by `--data-dir` must be writable; if the default one is not, sessions are kept only in memory.
/// Returns `None` then, and also if sessions are in PostgreSQL.
pub(crate) fn data_folder(args: &SessionArgs) -> Result<Option<PathBuf>> {
    if args.place.has_index() {
        return Ok(None);
    }
    if let Some(folder) = &args.data_dir {
        check_writable(folder).with_context(|| format!("--data-dir {} must be a writable folder", folder.display()))?;
        return Ok(Some(folder.clone()));
    }
    let folder = default_folder();
    if let Err(error) = check_writable(&folder) {
        warn!(
            %error,
            "cannot write to the default data folder {}: sessions end with the server; set --data-dir to keep them",
            folder.display()
        );
        return Ok(None);
    }
    Ok(Some(folder))
}

/// Returns the data folder that is used if no flag names one.
pub(crate) fn default_folder() -> PathBuf {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("XDG_DATA_HOME")
        .or_else(|| Some(variable("HOME")?.join(".local/share")))
        .map_or_else(|| "tidegate-data".into(), |base| base.join("tidegate"))
}

fn check_writable(folder: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    let probe = folder.join(format!(".probe-{}", std::process::id()));
    std::fs::write(&probe, b"")?;
    std::fs::remove_file(probe)
}

/// Returns the secret that signs snapshots and seals states: the contents of `--secret-file`.
pub(crate) fn secret(args: &SessionArgs) -> Result<Option<Vec<u8>>> {
    let Some(path) = &args.secret_file else { return Ok(None) };
    let secret = std::fs::read(path).with_context(|| format!("--secret-file: {}", path.display()))?;
    // A text file usually ends with a line break that is not part of the secret; in a binary file, every byte counts.
    Ok(Some(if secret.is_ascii() { secret.trim_ascii().to_vec() } else { secret }))
}

/// Divides `--ram-budget`, and limits the prefix cache accordingly.
fn divide_memory(budget: u64, served: &Served) -> RamSplit {
    let split = RamSplit::new(budget, served.memory, served.prefixes.max_bytes() as u64);
    let RamSplit { model, requests, prefixes, states, .. } = split;
    served.prefixes.limit(usize::try_from(prefixes).unwrap_or(usize::MAX));
    if split.is_over() {
        warn!(
            "--ram-budget {} MiB is too small: weights, slots and requests take {} MiB, and the least caches {} MiB more",
            budget >> 20,
            mib(model.weights + model.slots + requests),
            mib(prefixes + states)
        );
    }
    split
}

const fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

/// Logs where sessions are kept and how memory is divided.
fn log(stats: &StoreStats, place: &str, memory: &RamSplit) {
    info!(
        sessions = stats.sessions,
        versions = stats.versions,
        disk_bytes = stats.disk_bytes,
        weights_mib = mib(memory.model.weights),
        slots_mib = mib(memory.model.slots),
        requests_mib = mib(memory.requests),
        prefixes_mib = mib(memory.prefixes),
        states_mib = mib(memory.states),
        "sessions in {place}, memory up to {} MiB",
        mib(memory.total())
    );
}

/// The default share of the disk budget for each of several API keys.
const SHARE_OF_KEY: Budget = Budget::Percent(25);

/// Returns the bytes that one owner may store on a server with `keys` API keys. A single key may use the whole disk. So
/// may every owner of a server without keys: owners are then the tokens that clients choose, so a limit per owner would
/// limit nobody.
fn owner_bytes(args: &SessionArgs, keys: usize) -> u64 {
    let default = if keys > 1 { SHARE_OF_KEY } else { Budget::Percent(100) };
    args.owner_budget.unwrap_or(default).of(args.disk_budget)
}

/// The space for one model's sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Space {
    /// Bytes of cached states.
    ram: u64,
    disk: u64,
    /// Bytes on disk per owner.
    owner: u64,
    /// Maximum number of sessions per owner.
    sessions: usize,
}

impl Space {
    /// Returns the space for each of several models, which share the budgets equally.
    fn shared(args: &SessionArgs, keys: usize, models: usize) -> Self {
        let (disk, count) = (args.disk_budget / models as u64, models as u64);
        let owner = (owner_bytes(args, keys) / count).min(disk);
        let ram = SharedRam::new(args.ram_budget, models, args.prefix_budget).states;
        Self { ram, disk, owner, sessions: (args.owner_sessions / models).max(1) }
    }
}

/// Opens the session store of the only model. `keys` is the number of API keys.
pub(crate) async fn open(args: &SessionArgs, keys: usize, data: Option<&Path>, served: &Served) -> Result<Store> {
    let memory = divide_memory(args.ram_budget, served);
    let (disk, owner) = (args.disk_budget, owner_bytes(args, keys));
    let space = Space { ram: memory.states, disk, owner, sessions: args.owner_sessions };
    let (store, place) = open_in(args, space, data, served).await?;
    log(&store.stats(), &place, &memory);
    Ok(store)
}

/// Opens the session store of one of several `models`.
pub(crate) async fn open_shared(
    args: &SessionArgs,
    (keys, models): (usize, usize),
    data: Option<&Path>,
    served: &Served,
) -> Result<Store> {
    let (store, place) = open_in(args, Space::shared(args, keys, models), data, served).await?;
    let StoreStats { sessions, versions, disk_bytes, .. } = store.stats();
    info!(sessions, versions, disk_bytes, "sessions of {} in {place}", served.name);
    Ok(store)
}

/// Opens the session store of one model: in the data folder, or with snapshots in an object store. Also returns a
/// description of the place.
async fn open_in(args: &SessionArgs, space: Space, data: Option<&Path>, served: &Served) -> Result<(Store, String)> {
    let codec = &served.codec;
    let folder = data.map(|data| sessions_folder(data, &codec.fingerprint));
    let location = folder.clone().map_or(Location::Memory, Location::Folder);
    let options = StoreOptions {
        durability: match args.durability {
            DurabilityArg::Turn => Durability::Turn,
            DurabilityArg::Memory => Durability::Memory,
        },
        ram_bytes: space.ram,
        disk_bytes: space.disk,
        owner_bytes: space.owner,
        owner_sessions: space.sessions,
        keep_versions: args.keep_versions,
        keep_text: args.keep_text == Switch::On,
        response_ttl: Duration::from_secs((args.response_days as u64).saturating_mul(24 * 60 * 60)),
        ..StoreOptions::new(location)
    };
    let codec = Arc::clone(codec);
    let model = sessions_folder(Path::new(""), &codec.fingerprint);
    let model = model.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let store = match &args.place.store {
        Some(url) if args.place.has_index() => {
            let index = index_url(&args.place)?;
            #[cfg(feature = "postgres")]
            {
                let index = index.parse().map_err(|error: String| anyhow::anyhow!("--index {error}"))?;
                Store::open_shared(objects(url, &model)?, (index, &model), options, codec).await?
            }
            #[cfg(not(feature = "postgres"))]
            {
                drop((url, index));
                bail!("--index needs a server that was built with the feature `postgres`");
            }
        }
        None => Store::open(options, codec).await?,
        Some(url) => {
            ensure!(folder.is_some(), "--store needs a data folder for its index; --data-dir names one");
            Store::open_with(objects(url, &model)?, options, codec).await?
        }
    };
    let place = match (&args.place.store, data) {
        (Some(url), _) if args.place.has_index() => format!("PostgreSQL, snapshots in {url}"),
        (Some(url), _) => url.clone(),
        (None, Some(data)) => data.display().to_string(),
        (None, None) => "memory".to_owned(),
    };
    Ok((store, place))
}

/// Opens the object store at `url`, with one prefix per model, like the folders.
pub(crate) fn objects(url: &str, model: &str) -> Result<Arc<dyn ObjectStore>> {
    let open = || {
        let url = Url::parse(url)?;
        if url.scheme() == "file"
            && let Ok(folder) = url.to_file_path()
        {
            return Ok(folder_objects(&folder.join(model))?);
        }
        let (objects, path) = objects_at(&url, std::env::vars())?;
        let objects: Arc<dyn ObjectStore> = Arc::new(PrefixStore::new(objects, path.join(model)));
        Ok::<_, anyhow::Error>(objects)
    };
    open().with_context(|| format!("--store {url}"))
}

/// Returns the URL of `--index`, or the contents of the `--index-file`.
pub(crate) fn index_url(place: &PlaceArgs) -> Result<String> {
    match (&place.index, &place.index_file) {
        (Some(SecretUrl(url)), _) => Ok(url.clone()),
        (None, Some(file)) => {
            let url = std::fs::read_to_string(file).with_context(|| format!("--index-file: {}", file.display()))?;
            Ok(url.trim().to_owned())
        }
        (None, None) => bail!("--index names no database"),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: SessionArgs,
    }

    #[test]
    fn several_models_use_no_more_disk_than_is_given() {
        let space =
            |line: &[&str], models| Space::shared(&Line::parse_from([&["tidegate"], line].concat()).args, 2, models);
        let two = space(&["--disk-budget", "1000", "--owner-sessions", "7"], 2);
        assert_eq!((two.disk, two.owner, two.sessions), (500, 125, 3));
        let three = space(&["--disk-budget", "900", "--owner-budget", "5000", "--owner-sessions", "1"], 3);
        assert_eq!((three.disk, three.owner, three.sessions), (300, 300, 1));
    }

    #[test]
    fn the_url_of_an_index_is_secret() {
        let parse = |line: &[&str]| Line::try_parse_from([&["tidegate"], line].concat());
        let url = "postgres://u:mellon7@h/d";
        let both = ["--index", url, "--store", "file:///s"];
        let args = parse(&both).map_err(|error| error.to_string()).expect("they are taken").args;
        assert!(args.place.has_index() && data_folder(&args).expect("none is needed").is_none());
        assert_eq!(index_url(&args.place).expect("a URL"), url);
        assert!(!format!("{args:?}").contains("mellon7"));
        for wrong in [&both[..2], &[&both[..], &["--index-file", "f"]].concat()] {
            let error = parse(wrong).map(drop).expect_err("they are refused").to_string();
            assert!(!error.contains("mellon7"), "{error}");
        }
    }

    #[test]
    fn an_owner_may_use_a_quarter_of_the_disk_if_there_are_several_keys_and_all_of_it_otherwise() {
        let bytes = |line: &[&str], keys| owner_bytes(&Line::parse_from([&["tidegate"], line].concat()).args, keys);
        assert_eq!([0, 1, 2, 9].map(|keys| bytes(&[], keys)), [64 << 30, 64 << 30, 16 << 30, 16 << 30]);
        let small = ["--disk-budget", "1000"];
        assert_eq!([0, 1, 2].map(|keys| bytes(&small, keys)), [1000, 1000, 250]);
        for keys in 0..3 {
            assert_eq!(bytes(&["--disk-budget", "1000", "--owner-budget", "40%"], keys), 400);
            assert_eq!(bytes(&["--disk-budget", "1000", "--owner-budget", "2000"], keys), 2000);
        }
    }
}
