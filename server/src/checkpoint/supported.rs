//! Explains why a folder or file that is not a supported checkpoint cannot be loaded, such as one with another
//! architecture.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

use serde_json::Value;
use tidegate_model::checkpoint::FileKind;
use tidegate_model::config::ConfigError;
use tidegate_model::{DecoderConfig, candle, checkpoint};

use super::error::OpenError;

/// Where messages refer the user.
const DOCUMENT: &str = "see docs/models.md";

/// Prefixes of the `model_type` of models with softmax attention over the whole text.
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

/// Parts of the `model_type` of models with a state of constant size, but of a kind that is not supported.
const OTHER_RECURRENT: [&str; 7] = ["mamba", "rwkv", "retnet", "hgrn", "griffin", "xlstm", "deltanet"];

/// The supported values of `model_type`: our own kernels compute the first four.
const SUPPORTED: [&str; 8] =
    ["rfa_gate", "rfa_seq2seq", "rwkv7", "mamba2", "mamba", "recurrent_gemma", "rwkv5", "rwkv6"];

/// The config of a model that can be served.
pub(super) enum Described {
    /// Our own kernels can compute the model; candle may be able to as well.
    Own(Box<DecoderConfig>),
    /// Only candle can compute the model.
    Candle(Box<candle::Config>),
}

impl Described {
    /// Returns the number of tokens in the vocabulary.
    pub(super) fn vocab_size(&self) -> usize {
        match self {
            Self::Own(config) => config.vocab_size,
            Self::Candle(config) => config.vocab_size(),
        }
    }

    /// Returns the tokens that end a text.
    pub(super) fn eos(&self) -> &[u32] {
        match self {
            Self::Own(config) => config.eos_token_id.as_slice(),
            Self::Candle(config) => config.eos(),
        }
    }

    /// Returns the bytes of one conversation's state in f32.
    pub(super) fn state_bytes(&self) -> usize {
        match self {
            Self::Own(config) => config.state_bytes(),
            Self::Candle(config) => config.state_bytes(),
        }
    }

    fn from_json(text: &str) -> Result<Self, ConfigError> {
        if candle::is_only_candle(text) {
            return Ok(Self::Candle(Box::new(candle::Config::from_json(text)?)));
        }
        Ok(Self::Own(Box::new(DecoderConfig::from_json(text)?)))
    }

    fn of_file(path: &Path) -> Result<Self, OpenError> {
        Ok(Self::Own(Box::new(checkpoint::Stored::open(path)?.config().clone())))
    }
}

/// The first bytes of a GGUF file.
const MAGIC: &[u8] = b"GGUF";

/// Architectures of GGUF files that need the other files of a model's folder.
const IN_FOLDERS: [&str; 3] = ["rfagate", "rfa_gate", "rfa_seq2seq"];

/// Refuses a path that is not a supported checkpoint, or whose config is wrong, with the path and the reason. Accepts a
/// folder without a config or any model file; the loader reports it.
pub(super) fn check(path: &Path) -> Result<(), OpenError> {
    checked(path).map(drop)
}

/// Returns the config of a checkpoint; fails if there is none.
pub(super) fn config(path: &Path) -> Result<Described, OpenError> {
    checked(path)?.ok_or_else(|| OpenError::Read { path: path.join("config.json"), source: ErrorKind::NotFound.into() })
}

/// Returns the config of a checkpoint, if there is one.
pub(super) fn checked(path: &Path) -> Result<Option<Described>, OpenError> {
    let refused = |reason: String| Err(OpenError::Unsupported { path: path.into(), reason });
    if path.is_file() {
        let config = path.with_file_name("config.json");
        return match (FileKind::of(path)?, architecture(path)) {
            (FileKind::Safetensors, _) if config.is_file() => {
                refused("is a part of the model of its folder: name the folder instead".into())
            }
            (FileKind::Pth | FileKind::Safetensors, _) => Described::of_file(path).map(Some),
            (FileKind::Gguf, Some(kind)) if is_whole(&kind) => Described::of_file(path).map(Some),
            _ => refused(file(path)),
        };
    }
    let config = path.join("config.json");
    match std::fs::read_to_string(&config) {
        Ok(text) => {
            if let Some(reason) = other_model(&text) {
                return refused(reason);
            }
            let read = Described::from_json(&text).map(Some);
            read.map_err(|source| OpenError::Config { path: config, source })
        }
        Err(_) => match whole_in(path) {
            Some(whole) => refused(format!("there is no config.json, but {}", file(&whole))),
            None => Ok(None),
        },
    }
}

/// Returns why a model with this `config.json` cannot be loaded, whatever its other files are; `None` if it can.
pub fn refused_config(config: &str) -> Option<String> {
    other_model(config).or_else(|| Described::from_json(config).err().map(|error| format!("config.json: {error}")))
}

/// Returns why a model with this `model_type` cannot be loaded; `None` if it can.
pub fn refused_type(kind: &str) -> Option<String> {
    (!SUPPORTED.contains(&kind)).then(|| unsupported("model_type", kind, &SUPPORTED))
}

/// Returns why a file `name` that starts with these bytes is not a GGUF file of a whole model. If the bytes do not
/// state an architecture, the answer is `None`, because only the whole file can tell.
pub fn refused_gguf(name: &str, head: &[u8]) -> Option<String> {
    if !head.starts_with(MAGIC) {
        return Some(format!("{name} is not a GGUF file"));
    }
    let kind = named(head).filter(|kind| !is_whole(kind))?;
    let supported: Vec<_> = checkpoint::gguf_architectures().collect();
    Some(format!("{name} is a GGUF file whose {}", unsupported("architecture", &kind, &supported)))
}

/// Returns why the model of a `config.json` is not supported; `None` if it is supported, or if its type is unknown.
fn other_model(config: &str) -> Option<String> {
    let config: Value = serde_json::from_str(config).ok()?;
    refused_type(config.get("model_type")?.as_str()?)
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

/// Returns whether a GGUF file with this architecture is a whole model.
fn is_whole(architecture: &str) -> bool {
    checkpoint::gguf_architectures().any(|known| known == architecture)
}

/// Returns why a file cannot be loaded, or not by naming its folder.
fn file(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    match architecture(path) {
        None if is_named(path, &["pth"]) => {
            format!("{name} may be RWKV-7 in one file: if so, name the file instead of its folder")
        }
        Some(kind) if is_whole(&kind) => format!("{name} is a whole model: name the file instead of its folder"),
        Some(kind) if !IN_FOLDERS.contains(&kind.as_str()) => {
            let supported: Vec<_> = checkpoint::gguf_architectures().collect();
            format!("{name} is a GGUF file whose {}", unsupported("architecture", &kind, &supported))
        }
        Some(_) => format!(
            "{name} is a GGUF file; a model is a folder, with the file as model.gguf beside config.json and tokenizer.json, \
             {DOCUMENT}"
        ),
        None => format!(
            "{name} is a file; a model is a folder with config.json, a GGUF file, or RWKV-7 as .pth or .safetensors, {DOCUMENT}"
        ),
    }
}

/// Returns the first file in a folder, by name, that may be a whole model.
fn whole_in(folder: &Path) -> Option<std::path::PathBuf> {
    let files = std::fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    files.filter(|path| is_named(path, &["gguf", "pth"])).min()
}

/// Returns whether the file's extension is one of `ends`.
fn is_named(path: &Path, ends: &[&str]) -> bool {
    path.extension().and_then(OsStr::to_str).is_some_and(|extension| ends.contains(&extension))
}

/// Returns the architecture that a GGUF file states, or an empty text if it states none; `None` for other files.
fn architecture(path: &Path) -> Option<String> {
    let mut head = Vec::new();
    File::open(path).ok()?.take(4096).read_to_end(&mut head).ok()?;
    if !head.starts_with(MAGIC) {
        return None;
    }
    if let Ok(metadata) = checkpoint::metadata(path)
        && let Ok(found) = metadata.architecture()
    {
        return Some(found.to_owned());
    }
    // A truncated or broken file may still state what it is.
    Some(named(&head).unwrap_or_default())
}

/// Returns the architecture that the first bytes of a GGUF file state.
fn named(head: &[u8]) -> Option<String> {
    let key = b"general.architecture";
    let at = head.windows(key.len()).position(|window| window == key)?;
    // The type of a string, its length in 8 bytes, and its bytes.
    let value = head[at + key.len()..].strip_prefix(&8_u32.to_le_bytes())?;
    let length = usize::try_from(u64::from_le_bytes(*value.first_chunk::<8>()?)).ok()?;
    Some(String::from_utf8_lossy(value.get(8..8_usize.checked_add(length)?)?).into_owned())
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
            ("rwkv", "is not supported: its memory is of another kind"),
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
    fn a_model_is_refused_before_its_weights_are_there() {
        let llama = "is not supported: its memory grows with the text; supported are rfa_gate";
        assert!(refused_type("llama").unwrap().starts_with(&format!("model_type \"llama\" {llama}")));
        assert_eq!(refused_type("rwkv7"), None);
        assert_eq!(refused_config(r#"{"model_type": "llama"}"#), refused_type("llama"));
        assert!(refused_config(r#"{"model_type": "rwkv7"}"#).unwrap().starts_with("config.json: "));
        assert!(refused_config("{").unwrap().starts_with("config.json: "));
        let tiny = std::fs::read_to_string("../weights/checkpoints/tidegate-tiny/config.json").unwrap();
        assert_eq!(refused_config(&tiny), None);
        let head = |kind: &str| {
            let length = (kind.len() as u64).to_le_bytes();
            [&b"GGUF\x03\0\0\0.general.architecture\x08\0\0\0"[..], &length, kind.as_bytes()].concat()
        };
        assert_eq!(refused_gguf("x.gguf", &head("rwkv7")), None);
        let words =
            "x.gguf is a GGUF file whose architecture \"llama\" is not supported: its memory grows with the text";
        assert!(refused_gguf("x.gguf", &head("llama")).unwrap().starts_with(words));
        // The architecture may come later in the file.
        assert_eq!(refused_gguf("x.gguf", &head("rwkv7")[..30]), None);
        assert_eq!(refused_gguf("x.gguf", b"<html>").unwrap(), "x.gguf is not a GGUF file");
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
        write("mamba");
        assert!(reason(&path).contains("is not supported: its memory is of another kind"), "{}", reason(&path));
        // A file of this architecture is opened as a whole model, but its header says that it has no metadata.
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
