//! The data folder, the secret, and the session store that the command line asks for.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use object_store::prefix::PrefixStore;
use tidegate_server::checkpoint::sessions_folder;
use tidegate_server::session::{Codec, Durability, Location, Store, StoreOptions};
use tracing::warn;
use url::Url;

use crate::cli::{DurabilityArg, ServeArgs, SessionArgs};

/// Creates the data folder and checks that it is writable, so that a mistake shows now and not as a lost session later.
/// A folder given by `--data-dir` must be writable; if the default one is not, sessions are kept in memory only.
pub(crate) fn data_folder(args: &ServeArgs) -> Result<Option<PathBuf>> {
    if let Some(folder) = &args.sessions.data_dir {
        check_writable(folder).with_context(|| format!("--data-dir {} must be a writable folder", folder.display()))?;
        return Ok(Some(folder.clone()));
    }
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let folder = variable("XDG_DATA_HOME")
        .or_else(|| Some(variable("HOME")?.join(".local/share")))
        .map_or_else(|| "tidegate-data".into(), |base| base.join("tidegate"));
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

fn check_writable(folder: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    let probe = folder.join(format!(".probe-{}", std::process::id()));
    std::fs::write(&probe, b"")?;
    std::fs::remove_file(probe)
}

/// The secret that signs snapshots and seals states: the contents of `--secret-file`.
pub(crate) fn secret(args: &SessionArgs) -> Result<Option<Vec<u8>>> {
    let Some(path) = &args.secret_file else { return Ok(None) };
    let secret = std::fs::read(path).with_context(|| format!("--secret-file: {}", path.display()))?;
    // A text file usually ends with a line break that is not part of the secret; in a binary file every byte counts.
    Ok(Some(if secret.is_ascii() { secret.trim_ascii().to_vec() } else { secret }))
}

/// Opens the session store of one model: in the data folder, or with snapshots in an object store.
pub(crate) async fn open(args: &SessionArgs, data: Option<&Path>, codec: &Arc<Codec>) -> Result<Store> {
    let folder = data.map(|data| sessions_folder(data, &codec.fingerprint));
    let location = folder.clone().map_or(Location::Memory, Location::Folder);
    let options = StoreOptions {
        durability: match args.durability {
            DurabilityArg::Turn => Durability::Turn,
            DurabilityArg::Memory => Durability::Memory,
        },
        ram_bytes: args.ram_budget,
        disk_bytes: args.disk_budget,
        owner_bytes: args.owner_budget,
        owner_sessions: args.owner_sessions,
        keep_versions: args.keep_versions,
        response_ttl: Duration::from_secs((args.response_days as u64).saturating_mul(24 * 60 * 60)),
        ..StoreOptions::new(location)
    };
    let codec = Arc::clone(codec);
    let Some(url) = &args.store else { return Ok(Store::open(options, codec).await?) };
    ensure!(folder.is_some(), "--store needs a data folder for its index; --data-dir names one");
    let (objects, path) = Url::parse(url)
        .map_err(anyhow::Error::from)
        .and_then(|url| Ok(object_store::parse_url_opts(&url, std::env::vars())?))
        .with_context(|| format!("--store {url}"))?;
    // One prefix per model, like the folders.
    let model = folder.as_deref().and_then(Path::file_name).unwrap_or_default().to_string_lossy().into_owned();
    let objects = PrefixStore::new(objects, path.join(model));
    Ok(Store::open_with(Arc::new(objects), options, codec).await?)
}
