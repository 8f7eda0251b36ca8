//! Why something that is not one of our checkpoints cannot be loaded: a name on a hub, another architecture, in a folder or
//! a GGUF file.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

use serde_json::Value;
use tidegate_model::{DecoderConfig, checkpoint};

use super::error::OpenError;

/// What messages refer to.
const DOCUMENT: &str = "see docs/models.md";

/// Beginnings of the `model_type` of models with softmax attention over their whole text.
const GROWING: [&str; 38] = [
    "aya",
    "baichuan",
    "bart",
    "bert",
    "bloom",
    "chatglm",
    "codegen",
    "cohere",
    "command",
    "dbrx",
    "deepseek",
    "exaone",
    "falcon",
    "gemma",
    "glm",
    "gpt",
    "granite",
    "internlm",
    "jais",
    "kimi",
    "llama",
    "marian",
    "minicpm",
    "minimax",
    "mistral",
    "mixtral",
    "mpt",
    "nemotron",
    "olmo",
    "opt",
    "persimmon",
    "phi",
    "qwen",
    "smollm",
    "stablelm",
    "starcoder",
    "t5",
    "yi",
];

/// Parts of the `model_type` of models with a memory of constant size, of another kind than ours.
const OTHER_RECURRENT: [&str; 7] = ["mamba", "rwkv", "retnet", "hgrn", "griffin", "xlstm", "deltanet"];

/// Our own.
const SUPPORTED: [&str; 4] = ["rfa_gate", "rfa_seq2seq", "rwkv7", "mamba2"];

/// What a GGUF file says that needs the other files of its folder.
const IN_FOLDERS: [&str; 3] = ["rfagate", "rfa_gate", "rfa_seq2seq"];

/// Refuses a path that is no checkpoint of ours, and a config that is wrong, with the path and the reason. A folder that
/// does not exist is left to the loader.
pub(super) fn check(path: &Path) -> Result<(), OpenError> {
    checked(path).map(drop)
}

/// The config of a folder that is one of ours.
pub(super) fn config(path: &Path) -> Result<DecoderConfig, OpenError> {
    checked(path)?.ok_or_else(|| OpenError::Read { path: path.join("config.json"), source: ErrorKind::NotFound.into() })
}

/// The config, if there is one.
fn checked(path: &Path) -> Result<Option<DecoderConfig>, OpenError> {
    let refused = |reason: String| Err(OpenError::Unsupported { path: path.into(), reason });
    if path.is_file() {
        return match architecture(path) {
            Some(kind) if is_whole(&kind) => Ok(Some(checkpoint::Stored::open(path)?.config().clone())),
            _ => refused(file(path)),
        };
    }
    if !path.exists() && is_hub_name(path) {
        return refused(format!(
            "no such folder; models are not downloaded by name: download it, such as with `hf download {name} \
             --local-dir FOLDER`, and then name the folder. Most models of hubs cannot be served, {DOCUMENT}",
            name = path.display()
        ));
    }
    let config = path.join("config.json");
    match std::fs::read_to_string(&config) {
        Ok(text) => {
            if let Some(reason) = other_model(&text) {
                return refused(reason);
            }
            let read = DecoderConfig::from_json(&text).map(Some);
            read.map_err(|source| OpenError::Config { path: config, source })
        }
        Err(_) => match gguf_in(path) {
            Some(gguf) => refused(format!("there is no config.json, but {}", file(&gguf))),
            None => Ok(None),
        },
    }
}

/// Whether a path is written like `organization/model`.
fn is_hub_name(path: &Path) -> bool {
    let text = path.to_string_lossy();
    let word = |part: &str| {
        let letters = part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
        letters && part.starts_with(|first: char| first.is_ascii_alphanumeric())
    };
    text.split_once('/')
        .is_some_and(|(organization, model)| word(organization) && word(model) && !Path::new(organization).exists())
}

/// Why the model of a `config.json` is not supported; `None` if it is one of ours, or has no type.
fn other_model(config: &str) -> Option<String> {
    let config: Value = serde_json::from_str(config).ok()?;
    let kind = config.get("model_type")?.as_str()?;
    (!SUPPORTED.contains(&kind)).then(|| unsupported("model_type", kind, &SUPPORTED))
}

fn unsupported(name: &str, kind: &str, supported: &[&str]) -> String {
    let shown: String = kind.chars().take(64).collect();
    let kind = kind.to_lowercase();
    let why = if OTHER_RECURRENT.iter().any(|part| kind.contains(part)) {
        ": its memory is of another kind"
    } else if GROWING.iter().any(|start| kind.starts_with(start)) {
        ": its memory grows with the text"
    } else {
        ""
    };
    format!("{name} {shown:?} is not supported{why}; supported are {}, {DOCUMENT}", supported.join(", "))
}

/// Whether a GGUF file of this architecture is a whole model.
fn is_whole(architecture: &str) -> bool {
    checkpoint::gguf_architectures().any(|known| known == architecture)
}

/// Why a file cannot be loaded, or not by its folder.
fn file(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    match architecture(path) {
        Some(kind) if is_whole(&kind) => format!("{name} is a whole model: name the file instead of its folder"),
        Some(kind) if !IN_FOLDERS.contains(&kind.as_str()) => {
            let supported: Vec<_> = checkpoint::gguf_architectures().collect();
            format!("{name} is a GGUF file whose {}", unsupported("architecture", &kind, &supported))
        }
        Some(_) => format!(
            "{name} is a GGUF file; a model is a folder, with the file as model.gguf beside config.json and tokenizer.json, \
             {DOCUMENT}"
        ),
        None => format!("{name} is a file; a model is a folder with config.json, or a GGUF file, {DOCUMENT}"),
    }
}

/// The first GGUF file of a folder, by name.
fn gguf_in(folder: &Path) -> Option<std::path::PathBuf> {
    let files = std::fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    files.filter(|path| path.extension().is_some_and(|extension| extension == "gguf")).min()
}

/// The architecture that a GGUF file names, or an empty text if it names none where files have it; `None` for other files.
fn architecture(path: &Path) -> Option<String> {
    let mut head = Vec::new();
    File::open(path).ok()?.take(4096).read_to_end(&mut head).ok()?;
    if !head.starts_with(b"GGUF") {
        return None;
    }
    if let Ok(metadata) = checkpoint::metadata(path)
        && let Ok(found) = metadata.architecture()
    {
        return Some(found.to_owned());
    }
    // A file that is cut off or broken may still say what it is.
    let key = b"general.architecture";
    let value = head.windows(key.len()).position(|window| window == key).map(|at| &head[at + key.len()..]);
    // The type of a string, its length in 8 bytes, and its bytes.
    let text = value.and_then(|value| {
        let length = value.strip_prefix(&8_u32.to_le_bytes())?.first_chunk::<8>()?;
        let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        value.get(12..12_usize.checked_add(length)?)
    });
    Some(text.map_or_else(String::new, |text| String::from_utf8_lossy(text).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason(path: &Path) -> String {
        check(path).err().map_or_else(String::new, |error| error.to_string())
    }

    #[test]
    fn a_config_of_another_architecture_is_named_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().display().to_string();
        for (kind, why) in [
            ("llama", "is not supported: its memory grows with the text"),
            ("qwen3", "is not supported: its memory grows with the text"),
            ("falcon_mamba", "is not supported: its memory is of another kind"),
            ("rwkv6", "is not supported: its memory is of another kind"),
            ("my_own", "is not supported; supported are rfa_gate"),
        ] {
            std::fs::write(folder.path().join("config.json"), format!(r#"{{"model_type": "{kind}"}}"#)).unwrap();
            let reason = reason(folder.path());
            let start = format!("{place}: model_type {kind:?} {why}");
            assert!(reason.starts_with(&start) && reason.ends_with("see docs/models.md"), "{reason}");
        }
        for kind in SUPPORTED {
            let config = format!(r#"{{"model_type": "{kind}", "vocab_size": "all"}}"#);
            std::fs::write(folder.path().join("config.json"), config).unwrap();
            assert!(reason(folder.path()).starts_with(&format!("{place}/config.json: ")), "{}", reason(folder.path()));
        }
        assert_eq!(reason(Path::new("../weights/checkpoints/tidegate-tiny")), "");
    }

    #[test]
    fn a_name_on_a_hub_says_what_to_do() {
        let found = reason(Path::new("mistralai/Mistral-7B"));
        assert!(found.starts_with("mistralai/Mistral-7B: no such folder; models are not downloaded"), "{found}");
        assert!(found.contains("hf download mistralai/Mistral-7B --local-dir"), "{found}");
        for path in ["/nowhere", "./a/b", "../a", "/a/b", "a/b/c", "src/nothing", "nowhere"] {
            assert_eq!(reason(Path::new(path)), "", "{path}");
        }
    }

    #[test]
    fn a_gguf_file_of_another_architecture_is_refused_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model-q4.gguf");
        let write = |kind: &str| {
            let mut bytes = b"GGUF\x03\0\0\0".to_vec();
            bytes.extend([0; 16]);
            bytes.extend(20_u64.to_le_bytes());
            bytes.extend(b"general.architecture\x08\0\0\0");
            bytes.extend((kind.len() as u64).to_le_bytes());
            bytes.extend(kind.as_bytes());
            std::fs::write(&path, bytes).unwrap();
        };
        write("llama");
        let words = "model-q4.gguf is a GGUF file whose architecture \"llama\" is not supported: its memory grows with the text";
        assert!(reason(&path).starts_with(&format!("{}: {words}", path.display())), "{}", reason(&path));
        let in_folder = format!("{}: there is no config.json, but {words}", folder.path().display());
        assert!(reason(folder.path()).starts_with(&in_folder), "{}", reason(folder.path()));
        write("rfagate");
        assert!(reason(&path).contains("a model is a folder, with the file as model.gguf"), "{}", reason(&path));
        write("mamba2");
        assert!(reason(&path).contains("is not supported: its memory is of another kind"), "{}", reason(&path));
        // A whole model is opened; this one says nowhere what it is.
        write("rwkv7");
        assert_eq!(reason(&path), "model-q4.gguf: general.architecture must be given, found none");
        let in_folder =
            "there is no config.json, but model-q4.gguf is a whole model: name the file instead of its folder";
        assert!(reason(folder.path()).ends_with(in_folder), "{}", reason(folder.path()));
        std::fs::write(&path, "GGUF, cut off").unwrap();
        assert!(reason(&path).contains("architecture \"\" is not supported; supported"), "{}", reason(&path));
        std::fs::write(&path, "text").unwrap();
        assert!(reason(&path).contains("is a file; a model is a folder"), "{}", reason(&path));
    }
}
