//! The shipped model, which is built into the program, so that the program can serve without any other file.

use std::fs::{self, DirBuilder, File};
use std::io::{Result as IoResult, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};
use tracing::warn;

/// The name of the model, and of its folder.
const NAME: &str = "tidegate-tiny";

/// The files of the checkpoint's folder that the server reads. A static, because each use of a constant may be a copy.
static FILES: [(&str, &[u8]); 5] = [
    ("config.json", include_bytes!("../../weights/checkpoints/tidegate-tiny/config.json")),
    ("generation_config.json", include_bytes!("../../weights/checkpoints/tidegate-tiny/generation_config.json")),
    ("model.safetensors", include_bytes!("../../weights/checkpoints/tidegate-tiny/model.safetensors")),
    ("tokenizer.json", include_bytes!("../../weights/checkpoints/tidegate-tiny/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../weights/checkpoints/tidegate-tiny/tokenizer_config.json")),
];

/// Returns the folder of the shipped checkpoint. Weights are mapped from files, so the checkpoint is unpacked into the
/// cache folder or, if that is not possible, into a new temporary folder.
pub(crate) fn folder() -> Result<PathBuf> {
    let cache = cache_folder();
    unpack(&cache).or_else(|error| {
        let private = std::env::temp_dir().join(format!("tidegate-{:016x}", rand::random::<u64>()));
        warn!(
            %error,
            "cannot unpack the shipped model into {}: each start leaves a copy such as {}; set XDG_CACHE_HOME to a folder \
             that can be written to",
            cache.display(),
            private.display()
        );
        // This fails if the folder exists: in a folder that everybody may write to, somebody else may have made it.
        let made = DirBuilder::new().mode(0o700).create(&private);
        made.and_then(|()| unpack(&private)).with_context(|| {
            format!("cannot unpack the shipped model into {}; name a model with --model", private.display())
        })
    })
}

fn cache_folder() -> PathBuf {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("XDG_CACHE_HOME")
        .or_else(|| Some(variable("HOME")?.join(".cache")))
        .map_or_else(|| "tidegate-cache".into(), |base| base.join("tidegate"))
}

/// Unpacks the checkpoint into a folder of `cache` that is named after the contents, unless it is there and complete.
fn unpack(cache: &Path) -> IoResult<PathBuf> {
    let digest = FILES.iter().fold(Sha256::new(), |digest, (_, contents)| digest.chain_update(contents)).finalize();
    let version = digest[..8].iter().fold(0, |number, byte| (number << 8) | u64::from(*byte));
    let parent = cache.join(format!("{version:016x}"));
    let folder = parent.join(NAME);
    let complete = || {
        let same_length = |(name, contents): &(&str, &[u8])| {
            fs::metadata(folder.join(name)).is_ok_and(|file| file.len() == contents.len() as u64)
        };
        FILES.iter().all(same_length)
    };
    if complete() {
        return Ok(folder);
    }
    // The folder is renamed once it is complete and on disk: another process may start at the same time, even one in
    // another container with the same process id.
    let partial = parent.join(format!(".{:016x}", rand::random::<u64>()));
    if let Err(error) = write(&partial) {
        // The disk may be full; without this, the next start would leave another copy.
        drop(fs::remove_dir_all(&partial));
        return Err(error);
    }
    if folder.exists() && !complete() {
        fs::remove_dir_all(&folder)?;
    }
    match fs::rename(&partial, &folder) {
        Err(_) if complete() => fs::remove_dir_all(&partial)?,
        renamed => renamed?,
    }
    Ok(folder)
}

/// Writes all files into a new folder.
fn write(folder: &Path) -> IoResult<()> {
    fs::create_dir_all(folder)?;
    FILES.iter().try_for_each(|(name, contents)| {
        let mut file = File::create(folder.join(name))?;
        file.write_all(contents)?;
        file.sync_all()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_the_shipped_folder_is_in_the_program() {
        let source = Path::new("../weights/checkpoints").join(NAME);
        for (name, contents) in &FILES {
            assert_eq!(fs::read(source.join(name)).unwrap(), *contents, "{name}");
        }
        let about = ["README.md", "loss.png"];
        for entry in fs::read_dir(source).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let known = FILES.iter().any(|(file, _)| *file == name) || about.contains(&name.as_str());
            assert!(known, "{name} is neither unpacked nor known to be for people alone");
        }
    }

    #[test]
    fn what_is_unpacked_is_used_again_and_made_whole() {
        let cache = tempfile::tempdir().unwrap();
        let folder = unpack(cache.path()).unwrap();
        assert_eq!(folder.file_name().unwrap(), NAME);
        let weights = folder.join("model.safetensors");
        let written = fs::metadata(&weights).unwrap().modified().unwrap();
        assert_eq!(unpack(cache.path()).unwrap(), folder);
        assert_eq!(fs::metadata(&weights).unwrap().modified().unwrap(), written, "unpacked again");

        fs::write(&weights, b"the disk was full").unwrap();
        assert_eq!(unpack(cache.path()).unwrap(), folder);
        for (name, contents) in &FILES {
            assert_eq!(fs::read(folder.join(name)).unwrap(), *contents, "{name}");
        }
        assert_eq!(fs::read_dir(folder.parent().unwrap()).unwrap().count(), 1, "a partial folder is left");
    }
}
