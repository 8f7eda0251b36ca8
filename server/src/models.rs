//! The models that the command line names, and how they are loaded.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tidegate_server::Served;
use tidegate_server::api::{Loader, ModelSource};
use tidegate_server::checkpoint::{self, Files, OpenOptions};
use tidegate_server::engine::EngineThread;
use tidegate_server::session::Store;
use tidegate_server::text::TOOL_TEMPLATE;

use crate::cli::{ModelArgs, ServeArgs};
use crate::place::{At, Place};
use crate::{shipped, store};

/// The models given to `serve`.
#[derive(Debug)]
pub(crate) enum Given {
    /// One model, which is always loaded, and its draft model.
    One { place: Place, name: Option<String>, draft: Option<Place> },
    /// Models that are loaded and unloaded; the first is the default one.
    Several(Vec<Named>),
}

/// A model, and its name in requests.
#[derive(Debug)]
pub(crate) struct Named {
    name: String,
    place: Place,
}

impl Given {
    pub(crate) fn new(args: &ServeArgs) -> Result<Self> {
        if args.models_dir.is_none() && args.model.model.len() < 2 {
            let (place, name) = one(&args.model)?;
            let both = name.is_some() && args.model_name.is_some();
            ensure!(!both, "--model PATH=NAME and --model-name both name the model: give one of them");
            let name = name.or_else(|| args.model_name.clone()).or_else(|| place.at.name());
            let vocabulary = &args.model.rwkv_vocabulary;
            let draft = args.draft_model.clone().map(|path| Place { at: At::of(path), vocabulary: vocabulary.clone() });
            return Ok(Self::One { place, name, draft });
        }
        ensure!(
            args.draft_model.is_none(),
            "--draft-model proposes tokens for one model: give one --model, and no --models-dir"
        );
        ensure!(args.model_name.is_none(), "--model-name names one model; name several with --model PATH=NAME");
        listed(args).map(Self::Several)
    }
}

/// Returns the files of a command's model, and the model's name if it is given or comes from a hub.
pub(crate) fn find(args: &ModelArgs) -> Result<(Files, Option<String>)> {
    let (place, name) = one(args)?;
    let name = name.or_else(|| place.at.name());
    Ok((place.find()?, name))
}

/// Returns the folder or file of a model, given as a path or a name on a hub, without a vocabulary. Ignores a name
/// after `=`.
pub(crate) fn path(given: &Path) -> Result<PathBuf> {
    split(given).0.weights()
}

/// Runs work that may take as long as a download, on a thread that the end of the process does not wait for.
pub(crate) async fn apart<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let (sender, done) = tokio::sync::oneshot::channel();
    std::thread::Builder::new().name("download".into()).spawn(move || sender.send(work()))?;
    done.await.context("the download stopped unexpectedly")?
}

/// Returns the place and the name of the model of a command that takes one model.
fn one(args: &ModelArgs) -> Result<(Place, Option<String>)> {
    let (at, name) = match args.model.as_slice() {
        [] => (At::Path(shipped::folder()?), None),
        [given] => split(given),
        _ => bail!("--model may be given once here"),
    };
    Ok((Place { at, vocabulary: args.rwkv_vocabulary.clone() }, name))
}

/// Splits `PATH=NAME`; a `PATH` without a name stays whole. A path that exists with the `=` in it has no name.
fn split(given: &Path) -> (At, Option<String>) {
    match given.to_str().and_then(|text| text.rsplit_once('=')) {
        Some((folder, name)) if !folder.is_empty() && !name.is_empty() && !given.exists() => {
            (At::of(folder.into()), Some(name.to_owned()))
        }
        _ => (At::of(given.into()), None),
    }
}

/// The extensions of the files listed from `--models-dir`.
const FILES: [&str; 2] = ["gguf", "pth"];

/// Returns every model of `--model`, and then those of `--models-dir` sorted by name: folders, then files.
pub(crate) fn listed(args: &ServeArgs) -> Result<Vec<Named>> {
    let mut models: Vec<Named> = Vec::new();
    let vocabulary = &args.model.rwkv_vocabulary;
    let named = |name: String, at: At| Named { name, place: Place { at, vocabulary: vocabulary.clone() } };
    for given in &args.model.model {
        let (at, name) = split(given);
        at.check().context("--model")?;
        if let At::Path(folder) = &at {
            let found = folder.is_file() || folder.join("config.json").is_file();
            ensure!(found, "--model {}: the folder has no config.json", folder.display());
        }
        let name = name.unwrap_or_else(|| match &at {
            At::Path(folder) => checkpoint::model_name(folder),
            At::Hub(name) => name.model().to_owned(),
        });
        models.push(named(name, at));
    }
    if let Some(parent) = &args.models_dir {
        let what = || format!("--models-dir {}", parent.display());
        let mut found = Vec::new();
        for entry in parent.read_dir().with_context(what)? {
            let folder = entry.with_context(what)?.path();
            let is_named = |end: &str| folder.extension().is_some_and(|extension| extension == end);
            let is_file = folder.is_file();
            let name = if folder.join("config.json").is_file() {
                folder.file_name()
            } else if is_file && FILES.into_iter().any(is_named) {
                folder.file_stem()
            } else {
                continue;
            };
            found.push((is_file, name.unwrap_or_default().to_string_lossy().into_owned(), folder));
        }
        // Folders come first, so that a file beside them never becomes the default model or takes a folder's name.
        found.sort();
        for (is_file, name, folder) in found {
            if is_file && models.iter().any(|model| model.name == name) {
                tracing::warn!("{} is not listed: another model is named {name}", folder.display());
                continue;
            }
            models.push(named(name, At::Path(folder)));
        }
    }
    ensure!(!models.is_empty(), "--models-dir has no folder with a config.json, and no .gguf or .pth file");
    let mut names = HashSet::new();
    for Named { name, place } in &models {
        let at = &place.at;
        ensure!(names.insert(name), "two models are named {name}, the second in {at}: use PATH=NAME");
    }
    Ok(models)
}

/// Returns the folders and files of the models. Models of a hub are downloaded first.
pub(crate) fn sources(models: Vec<Named>) -> Result<Vec<ModelSource>> {
    let source = |Named { name, place }| {
        let Files { path: folder, vocabulary } = place.find()?;
        Ok(ModelSource { stamp: stamp(&folder, vocabulary.as_deref()), name, folder, vocabulary })
    };
    models.into_iter().map(source).collect()
}

/// Returns a hash that changes with the names, sizes and times of the model's files and of its vocabulary.
fn stamp(model: &Path, vocabulary: Option<&Path>) -> u64 {
    let mut files: Vec<PathBuf> = match model.read_dir() {
        // Of subfolders, only the file that the server reads counts.
        Ok(entries) => entries.flatten().map(|entry| entry.path()).chain([model.join(TOOL_TEMPLATE)]).collect(),
        Err(_) => vec![model.into()],
    };
    files.extend(vocabulary.map(Path::to_path_buf));
    files.sort();
    let mut hasher = DefaultHasher::new();
    for file in files {
        let about = std::fs::metadata(&file).ok();
        (file, about.map(|about| (about.len(), about.modified().ok()))).hash(&mut hasher);
    }
    hasher.finish()
}

/// Loads the models of `serve`.
pub(crate) struct CheckpointLoader {
    pub(crate) args: ServeArgs,
    pub(crate) options: OpenOptions,
    /// Number of API keys.
    pub(crate) keys: usize,
    /// Number of models, which share the budgets.
    pub(crate) models: usize,
    pub(crate) data: Option<PathBuf>,
}

impl Loader for CheckpointLoader {
    fn size(&self, model: &ModelSource) -> Result<u64, String> {
        let memory = checkpoint::size(&model.folder, &self.options).map_err(|error| error.to_string())?;
        Ok(memory.weights + memory.slots)
    }

    fn load(&self, model: &ModelSource) -> Result<(Served, EngineThread), String> {
        let (name, vocabulary) = (Some(model.name.clone()), model.vocabulary.clone());
        let options = OpenOptions { name, vocabulary, ..self.options.clone() };
        checkpoint::open(&model.folder, &options).map_err(|error| error.to_string())
    }

    fn store<'a>(&'a self, served: &'a Served) -> BoxFuture<'a, Result<Store, String>> {
        let opening = store::open_shared(&self.args.sessions, (self.keys, self.models), self.data.as_deref(), served);
        opening.map(|store| store.map_err(|error| format!("{error:#}"))).boxed()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: ServeArgs,
    }

    /// Returns the names and folders of several models, or the error.
    fn several(line: &[&str]) -> Result<Vec<(String, PathBuf)>, String> {
        match Given::new(&Line::parse_from([&["tidegate"], line].concat()).args) {
            Ok(Given::Several(models)) => {
                Ok(sources(models).unwrap().into_iter().map(|source| (source.name, source.folder)).collect())
            }
            Ok(Given::One { .. }) => Err("one".into()),
            Err(error) => Err(format!("{error:#}")),
        }
    }

    /// Creates a folder with checkpoints of these names.
    fn folder(names: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for name in names {
            std::fs::create_dir(folder.path().join(name)).unwrap();
            std::fs::write(folder.path().join(name).join("config.json"), "{}").unwrap();
        }
        folder
    }

    #[test]
    fn a_model_is_a_path_or_a_path_and_a_name() {
        let made = folder(&["a", "b", "c=d"]);
        let path = |name: &str| made.path().join(name);
        let text = |name: &str| path(name).to_str().unwrap().to_owned();
        let found = several(&["--model", &format!("{}=org/x", text("a")), "--model", &text("c=d")]);
        assert_eq!(found.unwrap(), [("org/x".into(), path("a")), ("c=d".into(), path("c=d"))]);
        assert_eq!(super::path(Path::new(&format!("{}=x", text("a")))).unwrap(), path("a"));
        let found = several(&["--model", &format!("{}=y", text("c=d")), "--model", &text("b")]);
        assert_eq!(found.unwrap(), [("y".into(), path("c=d")), ("b".into(), path("b"))]);
        for (line, words) in [
            (
                vec!["--model".to_owned(), text("a"), "--model".into(), format!("{}=a", text("b"))],
                "two models are named a",
            ),
            (
                vec!["--model".into(), text("a"), "--model".into(), text("none")],
                "none: there is no such file or folder, and it is not a model's name on a hub",
            ),
            (
                vec!["--model".into(), text("a"), "--model".into(), "src/none".into()],
                "src/none: there is no such file or folder, and it is read as a path, not a name on a hub",
            ),
            (vec!["--model".into(), text("a"), "--model".into(), text("")], "has no config.json"),
            (vec!["--model".into(), text("a"), "--model".into(), text("b"), "--model-name=z".into()], "--model-name"),
            (vec!["--model".into(), format!("{}=x", text("a")), "--model-name=z".into()], "give one of them"),
            (vec!["--model".into(), format!("{}=x", text("a"))], "one"),
        ] {
            let line: Vec<&str> = line.iter().map(String::as_str).collect();
            let error = several(&line).unwrap_err();
            assert!(error.contains(words), "{line:?}: {error}");
        }
    }

    #[test]
    fn a_model_may_be_on_a_hub() {
        let given = |line: &[&str]| Given::new(&Line::parse_from([&["tidegate"], line].concat()).args).unwrap();
        let hub = |name: &str| Place { at: At::Hub(name.parse().unwrap()), vocabulary: None };
        for (line, expected, called) in [
            (&["--model", "nobody/some-model"][..], "nobody/some-model", "nobody/some-model"),
            (&["--model", "nobody/x@v1:y.gguf=mine"], "nobody/x@v1:y.gguf", "mine"),
            (&["--model", "nobody/x", "--model-name", "mine"], "nobody/x", "mine"),
        ] {
            let Given::One { place, name, .. } = given(line) else { panic!("{line:?} are several") };
            assert_eq!((place, name.as_deref()), (hub(expected), Some(called)), "{line:?}");
        }
        let Given::Several(models) = given(&["--model", "nobody/x", "--model", "nobody/y=z"]) else { panic!("one") };
        let names: Vec<_> = models.iter().map(|model| model.name.as_str()).collect();
        assert_eq!((names, &models[0].place), (vec!["nobody/x", "z"], &hub("nobody/x")));
        assert!(
            several(&["--model", "nobody/x:a.gguf", "--model", "nobody/x:b.gguf"]).unwrap_err().contains("PATH=NAME")
        );
    }

    #[test]
    fn a_model_may_be_a_file_with_its_name() {
        let made = tempfile::tempdir().unwrap();
        let path = |name: &str| made.path().join(name).to_str().unwrap().to_owned();
        for name in ["a.gguf", "b.gguf"] {
            std::fs::write(path(name), "").unwrap();
        }
        let found = several(&["--model", &path("a.gguf"), "--model", &format!("{}=c", path("b.gguf"))]).unwrap();
        assert_eq!(found, [("a".into(), path("a.gguf").into()), ("c".into(), path("b.gguf").into())]);
    }

    #[test]
    fn a_stamp_changes_with_the_model_and_with_its_vocabulary() {
        let (models, vocabulary) = (folder(&["m"]), tempfile::NamedTempFile::new().unwrap());
        let (folder, file) = (models.path().join("m"), models.path().join("a.gguf"));
        std::fs::write(&file, "").unwrap();
        std::fs::create_dir(folder.join("additional_chat_templates")).unwrap();
        std::fs::write(folder.join(TOOL_TEMPLATE), "").unwrap();
        let (config, template) = (folder.join("config.json"), folder.join(TOOL_TEMPLATE));
        for (model, part) in [(&file, file.clone()), (&folder, config), (&folder, template)] {
            let stamps = || [None, Some(vocabulary.path())].map(|vocabulary| stamp(model, vocabulary));
            let [alone, with] = stamps();
            assert_ne!(alone, with);
            std::fs::write(&vocabulary, format!("vocabulary of {}", part.display())).unwrap();
            assert!(stamps()[0] == alone && stamps()[1] != with, "{}", part.display());
            std::fs::write(&part, "longer than any config.json that tests write".repeat(99)).unwrap();
            assert_ne!(stamps()[0], alone, "{}", part.display());
        }
    }

    #[test]
    fn folders_and_then_files_are_listed_by_name_after_the_models_that_are_given() {
        let made = folder(&["z", "b"]);
        std::fs::create_dir(made.path().join("no model")).unwrap();
        for name in ["c.d.gguf", "a.pth", "a.gguf", "b.gguf", "rwkv_vocab_v20230424.txt", "e.safetensors", "gguf"] {
            std::fs::write(made.path().join(name), "").unwrap();
        }
        std::fs::create_dir(made.path().join("folder.gguf")).unwrap();
        let other = folder(&["m"]);
        let (parent, first) = (made.path().to_str().unwrap(), other.path().join("m"));
        let names =
            |line: &[&str]| -> Vec<String> { several(line).unwrap().into_iter().map(|(name, _)| name).collect() };
        assert_eq!(names(&["--models-dir", parent]), ["b", "z", "a", "c.d"], "the first of a name counts");
        let line = ["--models-dir", parent, "--model", first.to_str().unwrap()];
        assert_eq!(names(&line), ["m", "b", "z", "a", "c.d"]);
        let empty = tempfile::tempdir().unwrap();
        assert!(several(&["--models-dir", empty.path().to_str().unwrap()]).unwrap_err().contains("no folder"));
        assert!(several(&["--models-dir", "/nowhere"]).unwrap_err().contains("/nowhere"));
    }

    #[test]
    fn a_folder_that_changes_has_another_stamp() {
        let made = folder(&["a"]);
        let (path, before) = (made.path().join("a"), stamp(&made.path().join("a"), None));
        assert_eq!(stamp(&path, None), before);
        std::fs::write(path.join("config.json"), "{ }").unwrap();
        assert_ne!(stamp(&path, None), before);
    }
}
