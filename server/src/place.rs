//! Where a model is, on disk or on a hub, and its files there. Files on a hub are downloaded.

use std::fmt::{self, Display};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Error, Result, bail};
use tidegate_model::checkpoint::FileKind;
use tidegate_server::checkpoint::Files;
use tidegate_server::text::vocabulary_of_file;
use tracing::info;

use crate::hub::{self, HubName, Settings, Vocabulary};

/// Where a model is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) at: At,
    /// The value of `--rwkv-vocabulary`.
    pub(crate) vocabulary: Option<PathBuf>,
}

/// A folder, a file, or a name on a hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum At {
    Path(PathBuf),
    Hub(HubName),
}

impl At {
    pub(crate) fn of(path: PathBuf) -> Self {
        HubName::of(&path).map_or(Self::Path(path), Self::Hub)
    }

    /// Returns the name that this gives its model, unless that is the name of the folder or file.
    pub(crate) fn name(&self) -> Option<String> {
        match self {
            Self::Path(_) => None,
            Self::Hub(name) => Some(name.model().to_owned()),
        }
    }

    /// Refuses a path at which there is no file or folder.
    pub(crate) fn check(&self) -> Result<()> {
        let Self::Path(path) = self else { return Ok(()) };
        if path.try_exists().with_context(|| path.display().to_string())? {
            return Ok(());
        }
        let why = match path.to_str().and_then(|text| text.parse::<HubName>().ok()) {
            // Only the folder of its organization keeps it from being a name: see `HubName::of`.
            Some(name) => {
                let folder = name.model().split('/').next().unwrap_or_default();
                format!("it is read as a path, not a name on a hub, because {folder} exists")
            }
            None => "it is not a model's name on a hub".into(),
        };
        bail!("{}: there is no such file or folder, and {why}", path.display())
    }

    /// Returns only the folder or file, for uses that read no text.
    pub(crate) fn weights(self) -> Result<PathBuf> {
        self.check()?;
        match self {
            Self::Path(path) => Ok(path),
            Self::Hub(name) => Ok(fetched(&name, None)?.path),
        }
    }
}

impl Display for At {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => path.display().fmt(formatter),
            Self::Hub(name) => name.fmt(formatter),
        }
    }
}

impl Place {
    /// Returns the files. Those of a hub are downloaded first, if they are not in the cache.
    pub(crate) fn find(self) -> Result<Files> {
        let Self { at, vocabulary } = self;
        at.check()?;
        match at {
            At::Path(path) => {
                let vocabulary = vocabulary_of_path(&path, vocabulary.as_deref())?;
                Ok(Files { path, vocabulary })
            }
            At::Hub(name) => fetched(&name, Some(&source(vocabulary.as_deref())?)),
        }
    }
}

fn source(given: Option<&Path>) -> Result<Vocabulary> {
    Vocabulary::of(given).map_err(Error::msg)
}

fn fetched(name: &HubName, vocabulary: Option<&Vocabulary>) -> Result<Files> {
    info!("there is no file or folder {name} here: it is read as a model's name on a hub");
    let fetched = Settings::read().and_then(|settings| hub::fetch(name, vocabulary, &settings));
    let hub::Fetched { path, vocabulary } =
        fetched.with_context(|| format!("there is no file or folder {name} here, and no model from a hub"))?;
    Ok(Files { path, vocabulary })
}

/// Returns RWKV's vocabulary for a model on disk that has none in its folder. A hub is asked only for a vocabulary that
/// is `given`, because serving files from disk must not require a network.
fn vocabulary_of_path(model: &Path, given: Option<&Path>) -> Result<Option<PathBuf>> {
    let needs = model.is_file() && FileKind::of(model).is_ok_and(|kind| kind != FileKind::Gguf);
    if !needs || vocabulary_of_file(model, None).is_some() {
        return Ok(None);
    }
    let source = source(given)?;
    match Settings::read() {
        Ok(settings) if given.is_some() => Ok(Some(source.find(&model.display().to_string(), &settings)?)),
        // Without settings, there is no cache.
        settings => Ok(settings.ok().and_then(|settings| source.cached(&settings))),
    }
}

/// Downloads a model and the vocabulary that it needs, and prints where the model is.
pub(crate) fn pull(name: &HubName, vocabulary: Option<&Path>, out: &mut impl Write) -> Result<()> {
    let hub::Fetched { path, vocabulary } = hub::fetch(name, Some(&source(vocabulary)?), &Settings::read()?)?;
    if let Some(vocabulary) = vocabulary {
        info!("RWKV's vocabulary is {}", vocabulary.display());
    }
    writeln!(out, "{}", path.display())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_without_a_file_or_folder_is_refused_before_anything_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("none");
        let reason =
            format!("{}: there is no such file or folder, and it is not a model's name on a hub", path.display());
        let at = At::of(path);
        assert_eq!(at.clone().weights().unwrap_err().to_string(), reason);
        let Err(error) = (Place { at, vocabulary: None }).find() else { panic!("there is nothing") };
        assert_eq!(error.to_string(), reason);
        assert_eq!(At::of(folder.path().into()).weights().unwrap(), folder.path());
    }
}
