//! Which files of a repository make a model that can be loaded.

use tidegate_model::checkpoint::{GGUF, INDEX, SAFETENSORS};

pub(super) const CONFIG: &str = "config.json";
const TOKENIZER: &str = "tokenizer.json";
/// RWKV's vocabulary, which takes the place of the tokenizer.
const VOCABULARY: (&str, &str) = ("rwkv_vocab_v", ".txt");
/// What is read beside them if it is there.
const OPTIONAL: [&str; 3] = ["generation_config.json", "tokenizer_config.json", "chat_template.jinja"];

/// How names of PyTorch's weights end.
const PYTORCH: [&str; 2] = [".bin", ".pth"];

/// Most files that an error lists.
const MOST_LISTED: usize = 20;

/// The files of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// A checkpoint folder.
    Folder {
        /// Everything but the weights, and the list of these if there are several; `config.json` first.
        texts: Vec<String>,
        weights: Weights,
    },
    /// A file that is a whole model.
    File(String),
}

/// The weights of a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Weights {
    /// One file.
    One(&'static str),
    /// The files that `model.safetensors.index.json` lists.
    Listed,
}

/// Chooses from all files of a repository: the one that is `wanted`, or else a folder's, or else the only GGUF file.
pub(super) fn choose(files: &[String], wanted: Option<&str>) -> Result<Choice, String> {
    let has = |name: &str| files.iter().any(|file| file == name);
    let whole: Vec<&str> = files.iter().map(String::as_str).filter(|file| is_gguf(file)).collect();
    if let Some(file) = wanted {
        if !is_gguf(file) {
            return Err(format!("{file} is not a GGUF file; only those are whole models"));
        }
        return if has(file) {
            Ok(Choice::File(file.into()))
        } else {
            Err(format!("there is no {file}{}", among(&whole)))
        };
    }
    let weights = [(SAFETENSORS, Weights::One(SAFETENSORS)), (INDEX, Weights::Listed), (GGUF, Weights::One(GGUF))];
    let weights = weights.into_iter().find(|(name, _)| has(name)).map(|(_, weights)| weights);
    if let Some(weights) = weights.filter(|_| has(CONFIG)) {
        let tokenizer = has(TOKENIZER).then_some(TOKENIZER).or_else(|| vocabulary(files));
        if let Some(tokenizer) = tokenizer {
            let list = (weights == Weights::Listed).then_some(INDEX);
            let optional = OPTIONAL.into_iter().filter(|name| has(name));
            let texts = [CONFIG].into_iter().chain(optional).chain([tokenizer]).chain(list);
            return Ok(Choice::Folder { texts: texts.map(Into::into).collect(), weights });
        }
        if weights != Weights::One(GGUF) {
            return Err(format!("there is no {TOKENIZER}, and no {}*{} either", VOCABULARY.0, VOCABULARY.1));
        }
    }
    match whole.as_slice() {
        [file] => Ok(Choice::File((*file).into())),
        [] if weights.is_some() => Err(format!("there is no {CONFIG}")),
        [] if files.iter().any(|file| PYTORCH.iter().any(|end| file.ends_with(end))) => Err(format!(
            "the weights are in a format of PyTorch: {SAFETENSORS} or a GGUF file is needed; to serve a .pth of RWKV-7, download it \
             and its vocabulary, see docs/models.md"
        )),
        [] => Err(format!("there are no weights: {SAFETENSORS}, {INDEX} or a GGUF file is needed")),
        _ => Err(format!("name one of the files with ORG/NAME:FILE{}", among(&whole))),
    }
}

pub(super) fn is_gguf(file: &str) -> bool {
    file.strip_suffix(".gguf").is_some_and(|rest| !rest.is_empty() && !rest.ends_with('/'))
}

/// The vocabulary that the tokenizer takes.
fn vocabulary(files: &[String]) -> Option<&str> {
    let named = |file: &&str| file.starts_with(VOCABULARY.0) && file.ends_with(VOCABULARY.1) && !file.contains('/');
    files.iter().map(String::as_str).filter(named).max()
}

/// A list of files, after what is said of them.
fn among(files: &[&str]) -> String {
    match files {
        [] => String::new(),
        [.., _] if files.len() > MOST_LISTED => {
            format!(": {} and {} more", files[..MOST_LISTED].join(", "), files.len() - MOST_LISTED)
        }
        _ => format!(": {}", files.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(files: &str, wanted: Option<&str>) -> Result<Choice, String> {
        choose(&files.split(' ').map(Into::into).collect::<Vec<_>>(), wanted)
    }

    fn texts(files: &str) -> (String, Weights) {
        match chosen(files, None) {
            Ok(Choice::Folder { texts, weights }) => (texts.join(" "), weights),
            other => panic!("{files}: {other:?}"),
        }
    }

    #[test]
    fn a_folder_has_what_the_server_reads() {
        for (files, expected, weights) in [
            (
                "README.md config.json generation_config.json model.safetensors pytorch_model.bin tokenizer.json x.gguf",
                "config.json generation_config.json tokenizer.json",
                Weights::One(SAFETENSORS),
            ),
            (
                "chat_template.jinja config.json model-00001-of-00002.safetensors model-00002-of-00002.safetensors \
                 model.safetensors.index.json tokenizer.json tokenizer.model tokenizer_config.json",
                "config.json tokenizer_config.json chat_template.jinja tokenizer.json model.safetensors.index.json",
                Weights::Listed,
            ),
            (
                "config.json model.safetensors rwkv_vocab_v20220101.txt rwkv_vocab_v20230424.txt old/rwkv_vocab_v3.txt",
                "config.json rwkv_vocab_v20230424.txt",
                Weights::One(SAFETENSORS),
            ),
            ("config.json model.gguf tokenizer.json", "config.json tokenizer.json", Weights::One(GGUF)),
        ] {
            assert_eq!(texts(files), (expected.into(), weights), "{files}");
        }
    }

    #[test]
    fn a_gguf_file_is_chosen_if_it_is_named_or_the_only_one() {
        let file = |name: &str| Ok(Choice::File(name.into()));
        assert_eq!(chosen("README.md a-Q8_0.gguf", None), file("a-Q8_0.gguf"));
        assert_eq!(chosen("config.json model.gguf", None), file("model.gguf"), "without a tokenizer, it is whole");
        assert_eq!(chosen("a.gguf q/b.gguf", Some("q/b.gguf")), file("q/b.gguf"));
        let folder = "config.json model.safetensors tokenizer.json a.gguf";
        assert_eq!(chosen(folder, Some("a.gguf")), file("a.gguf"));
    }

    #[test]
    fn what_is_missing_is_named() {
        for (files, wanted, words) in [
            ("a.gguf b.gguf", None, "name one of the files with ORG/NAME:FILE: a.gguf, b.gguf"),
            ("a.gguf b.gguf", Some("c.gguf"), "there is no c.gguf: a.gguf, b.gguf"),
            ("a.gguf", Some("README.md"), "README.md is not a GGUF file"),
            ("config.json model.safetensors", None, "there is no tokenizer.json, and no rwkv_vocab_v*.txt either"),
            ("tokenizer.json model.safetensors", None, "there is no config.json"),
            ("config.json tokenizer.json pytorch_model.bin", None, "the weights are in a format of PyTorch"),
            ("config.json tokenizer.json", None, "there are no weights"),
            ("sub/model.safetensors config.json", None, "there are no weights"),
        ] {
            let error = chosen(files, wanted).expect_err(files);
            assert!(error.starts_with(words), "{files}: {error}");
        }
        let many: Vec<String> = (0..30).map(|number| format!("{number}.gguf")).collect();
        assert!(choose(&many, None).unwrap_err().ends_with("19.gguf and 10 more"));
    }
}
