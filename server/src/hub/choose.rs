//! Chooses the files of a repository that form a model.

use tidegate_model::checkpoint::{GGUF, INDEX, SAFETENSORS};
use tidegate_server::text::TOOL_TEMPLATE;

pub(super) const CONFIG: &str = "config.json";
const TOKENIZER: &str = "tokenizer.json";
/// The prefix and suffix of the file name of RWKV's vocabulary, which replaces `tokenizer.json`.
const VOCABULARY: (&str, &str) = ("rwkv_vocab_v", ".txt");
/// Files that are also read if they exist.
const OPTIONAL: [&str; 4] = ["generation_config.json", "tokenizer_config.json", "chat_template.jinja", TOOL_TEMPLATE];

/// File name endings of PyTorch's weights.
const PYTORCH: [&str; 2] = [".bin", PTH];
/// File name endings of RWKV-7 without a vocabulary, as its author publishes it.
const PTH: &str = ".pth";
const TENSORS: &str = ".safetensors";

/// Maximum number of files that an error lists.
const MOST_LISTED: usize = 20;

/// The files of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// A checkpoint folder's files.
    Folder {
        /// All files but the weights; `config.json` comes first, and the index of the weights is included if there is
        /// one.
        texts: Vec<String>,
        weights: Weights,
    },
    /// A file that holds a whole model.
    File(String),
}

/// The weights of a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Weights {
    /// A single file.
    One(&'static str),
    /// The files that `model.safetensors.index.json` lists.
    Listed,
}

/// Chooses from all files of a repository: the `wanted` file, or else the files of a checkpoint folder, or else the
/// only GGUF file, or else the only `.pth` file.
pub(super) fn choose(files: &[String], wanted: Option<&str>) -> Result<Choice, String> {
    let has = |name: &str| files.iter().any(|file| file == name);
    let whole: Vec<&str> = whole_models(files).collect();
    if let Some(file) = wanted {
        return chosen(files, file, &whole);
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
    let gguf: Vec<&str> = whole.iter().copied().filter(|file| is_gguf(file)).collect();
    match if gguf.is_empty() { &whole } else { &gguf }.as_slice() {
        [file] => Ok(Choice::File((*file).into())),
        [] if weights.is_some() => Err(format!("there is no {CONFIG}")),
        [] if files.iter().any(|file| PYTORCH.iter().any(|end| file.ends_with(end))) => Err(format!(
            "the weights are in a format of PyTorch: {SAFETENSORS} or a GGUF file is needed; a .pth of RWKV-7 is named with \
             ORG/NAME:FILE"
        )),
        [] => Err(format!("there are no weights: {SAFETENSORS}, {INDEX} or a GGUF file is needed")),
        _ => Err(format!("name one of the files with ORG/NAME:FILE{}", among(&whole))),
    }
}

/// Chooses the wanted file of a repository.
fn chosen(files: &[String], file: &str, whole: &[&str]) -> Result<Choice, String> {
    let (is_tensors, folder) = (is_named(file, TENSORS), folder_of(file));
    if !is_tensors && !is_gguf(file) && !is_named(file, PTH) {
        return Err(format!(
            "{file} is not a GGUF file, and not RWKV-7 as {PTH} or {TENSORS}; only those are whole models"
        ));
    }
    if !files.iter().any(|known| known == file) {
        return Err(format!("there is no {file}{}", among(whole)));
    }
    if is_tensors && has_config(files, folder) {
        return Err(format!("{file} is a part of the model of its folder"));
    }
    Ok(Choice::File(file.into()))
}

/// Returns the files that, by their names, are whole models. Excludes safetensors files, which count only if they are
/// wanted, and `.pth` files beside a `config.json`, which may be anything.
pub(super) fn whole_models(files: &[String]) -> impl Iterator<Item = &str> {
    let in_folder = files.iter().any(|file| file == CONFIG);
    files.iter().map(String::as_str).filter(move |file| is_gguf(file) || !in_folder && is_named(file, PTH))
}

/// Returns the safetensors files that may be whole models: those that no `config.json`, beside them or in the root,
/// describes as parts of one. Only their contents can tell, because any model may be stored this way.
pub(super) fn single_tensors(files: &[String]) -> impl Iterator<Item = &str> {
    let is_part = move |file: &str| has_config(files, "") || has_config(files, folder_of(file));
    files.iter().map(String::as_str).filter(move |file| is_named(file, TENSORS) && !is_part(file))
}

/// Returns whether a folder, given with a trailing slash, has a `config.json`.
fn has_config(files: &[String], folder: &str) -> bool {
    files.iter().any(|file| file.strip_prefix(folder) == Some(CONFIG))
}

pub(super) fn is_gguf(file: &str) -> bool {
    is_named(file, ".gguf")
}

fn is_named(file: &str, end: &str) -> bool {
    file.strip_suffix(end).is_some_and(|rest| !rest.is_empty() && !rest.ends_with('/'))
}

/// Returns the folder of a file with a trailing slash, or an empty text.
fn folder_of(file: &str) -> &str {
    &file[..file.rfind('/').map_or(0, |slash| slash + 1)]
}

/// Returns RWKV's vocabulary, as the tokenizer chooses it.
pub(super) fn vocabulary(files: &[String]) -> Option<&str> {
    vocabulary_in(files, "")
}

/// Returns the vocabulary for the file `model`: in its folder, or else in the repository's root.
pub(super) fn vocabulary_of<'a>(files: &'a [String], model: &str) -> Option<&'a str> {
    vocabulary_in(files, folder_of(model)).or_else(|| vocabulary(files))
}

fn vocabulary_in<'a>(files: &'a [String], folder: &str) -> Option<&'a str> {
    let is_in = |file: &&str| file.strip_prefix(folder).is_some_and(|name| !name.contains('/') && is_vocabulary(name));
    files.iter().map(String::as_str).filter(is_in).max()
}

/// Returns whether a file's name is that of RWKV's vocabulary.
pub(super) fn is_vocabulary(name: &str) -> bool {
    name.starts_with(VOCABULARY.0) && name.ends_with(VOCABULARY.1)
}

/// Formats a list of files as the end of a sentence.
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
                "additional_chat_templates/rag.jinja additional_chat_templates/tool_use.jinja chat_template.jinja config.json \
                 model-00001-of-00002.safetensors model-00002-of-00002.safetensors \
                 model.safetensors.index.json tokenizer.json tokenizer.model tokenizer_config.json",
                "config.json tokenizer_config.json chat_template.jinja additional_chat_templates/tool_use.jinja tokenizer.json \
                 model.safetensors.index.json",
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
    fn rwkv_7_in_one_file_is_chosen_if_it_is_named_or_the_only_pth() {
        let file = |name: &str| Ok(Choice::File(name.into()));
        assert_eq!(chosen("README.md a.pth", None), file("a.pth"));
        assert_eq!(chosen("a.gguf b.pth", None), file("a.gguf"), "a GGUF file has its vocabulary");
        assert_eq!(chosen("a.pth q/b.pth", Some("q/b.pth")), file("q/b.pth"));
        assert_eq!(chosen("a.safetensors a.pth", Some("a.safetensors")), file("a.safetensors"));
        let files: Vec<String> = ["q/a.pth", "q/rwkv_vocab_v1.txt", "rwkv_vocab_v2.txt"].map(Into::into).to_vec();
        let of = |model: &str| vocabulary_of(&files, model);
        assert_eq!(
            [of("q/a.pth"), of("b.pth"), of("r/b.pth")],
            [&files[1], &files[2], &files[2]].map(|it| Some(&**it))
        );
        assert_eq!(vocabulary_of(&files[..2], "b.pth"), None);
    }

    #[test]
    fn safetensors_beside_a_config_are_no_single_files() {
        let single = |files: &str| {
            let files: Vec<String> = files.split(' ').map(Into::into).collect();
            single_tensors(&files).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(single("README.md a.pth a.safetensors q/b.safetensors"), "a.safetensors q/b.safetensors");
        assert_eq!(single("a.safetensors q/b.safetensors q/config.json"), "a.safetensors");
        assert_eq!(single("config.json model.safetensors q/b.safetensors"), "");
    }

    #[test]
    fn what_is_missing_is_named() {
        for (files, wanted, words) in [
            ("a.gguf b.gguf", None, "name one of the files with ORG/NAME:FILE: a.gguf, b.gguf"),
            ("a.gguf b.gguf", Some("c.gguf"), "there is no c.gguf: a.gguf, b.gguf"),
            ("a.gguf", Some("README.md"), "README.md is not a GGUF file, and not RWKV-7 as .pth or .safetensors"),
            ("a.pth b.pth", None, "name one of the files with ORG/NAME:FILE: a.pth, b.pth"),
            ("a.pth b.gguf", Some("c.pth"), "there is no c.pth: a.pth, b.gguf"),
            ("config.json b.pth", None, "the weights are in a format of PyTorch"),
            ("q/config.json q/a.safetensors", Some("q/a.safetensors"), "q/a.safetensors is a part of the model of"),
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
