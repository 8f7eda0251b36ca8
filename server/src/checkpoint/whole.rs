//! The tokenizer, chat template and name of a model in one file.

mod byte_pairs;
mod sampling;
mod scored_pieces;
mod tokens;
mod world;

use std::path::Path;

use tidegate_model::checkpoint::{self, FileKind, Metadata, MetadataError};

use super::error::OpenError;
use crate::text::{ChatTemplate, TemplateSource, TemplateSources, TextError, Tokenizer};

/// What llama.cpp's converter writes instead of a chat template if it has none.
const NO_TEMPLATE: &str = "rwkv-world";

/// Tokens that templates may use, and the metadata keys of their ids.
const TEMPLATE_TOKENS: [(&str, &str); 4] = [
    ("bos_token", "tokenizer.ggml.bos_token_id"),
    ("eos_token", "tokenizer.ggml.eos_token_id"),
    ("unk_token", "tokenizer.ggml.unknown_token_id"),
    ("pad_token", "tokenizer.ggml.padding_token_id"),
];

/// Maximum length of a name in bytes.
const MOST_NAME: usize = 128;

/// Returns the name that a GGUF file gives its model, if it is a usable name.
pub(super) fn name(file: &Path) -> Option<String> {
    FileKind::of(file).ok().filter(|kind| *kind == FileKind::Gguf)?;
    let metadata = checkpoint::metadata(file).ok()?;
    let name = metadata.text("general.name").ok()??.trim();
    let fits = !name.is_empty() && name.len() <= MOST_NAME && !name.contains(char::is_control);
    fits.then(|| name.to_owned())
}

/// Returns the tokenizer and the chat template of the model in `file`. `eos` has the ids that end a text; `vocabulary`
/// is RWKV's vocabulary file, if the model needs one and has none in its folder.
pub(super) fn text(
    file: &Path,
    vocabulary: Option<&Path>,
    vocab_size: usize,
    eos: &[u32],
) -> Result<(Tokenizer, Option<ChatTemplate>), OpenError> {
    if FileKind::of(file)? != FileKind::Gguf {
        let mut tokenizer = Tokenizer::of_file(file, vocabulary, vocab_size)?;
        tokenizer.end_with(eos);
        let template = ChatTemplate::of_file(file, None, &tokenizer)?;
        return Ok((tokenizer, template));
    }
    let metadata = checkpoint::metadata(file)?;
    let bad = |reason: String| TextError::Contents { path: file.into(), reason };
    let mut tokenizer = tokenizer(&metadata, vocab_size).map_err(bad)?;
    tokenizer.end_with(eos);
    let source = |key: &str| {
        let text = metadata.text(key).map_err(|error| bad(error.to_string()))?;
        Ok::<_, TextError>(text.map(|text| TemplateSource { path: file.into(), text: text.into() }))
    };
    let default = source("tokenizer.chat_template")?.filter(|source| source.text != NO_TEMPLATE);
    let with_tools = source("tokenizer.chat_template.tool_use")?;
    let tokens = template_tokens(&metadata).map_err(|error| bad(error.to_string()))?;
    let sources = default.map(|default| TemplateSources { default, with_tools, tokens });
    let template = ChatTemplate::of_file(file, sources, &tokenizer)?;
    Ok((tokenizer, template))
}

/// Returns the tokenizer, of whichever kind llama.cpp names in the file, with the file's recommended parameters.
fn tokenizer(metadata: &Metadata, vocab_size: usize) -> Result<Tokenizer, String> {
    let defaults = sampling::recommended(metadata).map_err(|error| error.to_string())?;
    match metadata.text("tokenizer.ggml.model").map_err(|error| error.to_string())? {
        Some("rwkv") => {
            let world = world::vocabulary(metadata)?;
            let tokenizer = Tokenizer::from_world(world, vocab_size, defaults);
            tokenizer.map_err(|error| error.to_string())
        }
        Some("gpt2") => {
            let pairs = byte_pairs::parts(metadata)?;
            let tokenizer = Tokenizer::from_byte_pairs(&pairs, vocab_size, defaults);
            tokenizer.map_err(|reason| format!("{}: {reason}", tokens::TOKENS))
        }
        Some("llama") => {
            let (pieces, ends) = scored_pieces::parts(metadata)?;
            let tokenizer = Tokenizer::from_scored_pieces(pieces, vocab_size, defaults);
            let mut tokenizer = tokenizer.map_err(|reason| format!("{}: {reason}", tokens::TOKENS))?;
            tokenizer.end_with(ends.as_slice());
            Ok(tokenizer)
        }
        found => {
            let found = found.unwrap_or("none");
            Err(format!("tokenizer.ggml.model must be rwkv, gpt2 or llama, found {}", found.escape_debug()))
        }
    }
}

/// Returns the tokens that a template may use.
fn template_tokens(metadata: &Metadata) -> Result<Vec<(&'static str, String)>, MetadataError> {
    let mut tokens = Vec::new();
    for (name, key) in TEMPLATE_TOKENS {
        let id = metadata.number(key)?.and_then(|id| usize::try_from(id).ok());
        let text = id.zip(metadata.texts(tokens::TOKENS)?).and_then(|(id, mut texts)| texts.nth(id));
        if let Some(text) = text {
            tokens.push((name, String::from_utf8_lossy(text).into_owned()));
        }
    }
    Ok(tokens)
}
