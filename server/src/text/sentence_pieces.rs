//! Support for `tokenizer.json` files in the style of SentencePiece: `▁` stands for a space, `<0xNN>` for a byte, and a
//! text may begin with a space that only the tokenizer has added.
//!
//! Such a space helps models, because they know most words with a space before them. So prompts get one, but it is not
//! part of the text. A text that continues another must not get one.

use serde_json::{Value, json};
use tokenizers::Tokenizer;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::models::ModelWrapper;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::metaspace::PrependScheme;

/// The character that stands for a space.
pub(super) const SPACE: char = '\u{2581}';

/// A tokenizer for texts that continue others.
pub(super) struct Continuing {
    pub(super) tokenizer: Tokenizer,
    /// Whether the tokenizer also adds a space after a special token.
    pub(super) after_special: bool,
}

/// Refuses a tokenizer that has an unknown part, or that has no token for some text.
pub(super) fn check(tokenizer: &Tokenizer) -> Result<(), String> {
    if !is_decoder(tokenizer.get_decoder()) {
        return Err(format!(
            "decoder must be ByteLevel, Metaspace, or a Sequence of Replace, ByteFallback, Fuse and Strip, found {}",
            kind(&described(tokenizer.get_decoder()))
        ));
    }
    let (normalizer, pre_tokenizer) = (described(tokenizer.get_normalizer()), described(tokenizer.get_pre_tokenizer()));
    if !steps(&normalizer).iter().all(|step| is_replace(step) || is_prepend(step)) {
        return Err(format!(
            "normalizer must be absent, or only put {SPACE} in the place of spaces and before a text, found {}",
            kind(&normalizer)
        ));
    }
    let replaces = steps(&normalizer).iter().any(is_replace);
    // Gemma's tokenizers split at spaces, of which the normalizer has left none.
    let splits_nothing = replaces && is_split_at_spaces(&pre_tokenizer);
    if !pre_tokenizer.is_null() && !is_metaspace(&pre_tokenizer) && !splits_nothing {
        return Err(format!(
            "pre_tokenizer must be absent or Metaspace where the decoder is not ByteLevel, found {}",
            kind(&pre_tokenizer)
        ));
    }
    if pre_tokenizer.is_null() && !replaces {
        return Err(format!("normalizer or pre_tokenizer must put {SPACE} in the place of spaces, and none does"));
    }
    check_model(tokenizer)
}

fn check_model(tokenizer: &Tokenizer) -> Result<(), String> {
    let falls_back = match tokenizer.get_model() {
        ModelWrapper::BPE(model) => {
            let part = |part: &Option<String>| part.as_ref().is_some_and(|part| !part.is_empty());
            if part(&model.continuing_subword_prefix) || part(&model.end_of_word_suffix) {
                return Err("model must have no continuing_subword_prefix and no end_of_word_suffix".into());
            }
            model.byte_fallback
        }
        ModelWrapper::Unigram(model) => model.byte_fallback(),
        _ => return Err("model must be BPE or Unigram".into()),
    };
    if !falls_back {
        return Err(
            "model must have byte_fallback where the decoder is not ByteLevel: other texts would be lost".into()
        );
    }
    // A byte that is a character needs no token of its own if the character has one: Gemma's tab, for example.
    let has = |byte: &u8| {
        let is_character = byte.is_ascii() && tokenizer.token_to_id(&char::from(*byte).to_string()).is_some();
        is_character || tokenizer.token_to_id(&format!("<0x{byte:02X}>")).is_some()
    };
    let missing = (0..=u8::MAX).filter(|byte| !matches!(byte, 0xc0 | 0xc1 | 0xf5..)).find(|byte| !has(byte));
    missing.map_or(Ok(()), |byte| Err(format!("must have a token for every byte of a text, and has no <0x{byte:02X}>")))
}

/// Returns the bytes of a token.
pub(super) fn bytes(token: &str) -> Vec<u8> {
    let byte = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>')).filter(|digits| digits.len() == 2);
    match byte.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
        Some(byte) => vec![byte],
        None => token.replace(SPACE, " ").into_bytes(),
    }
}

/// Returns a copy of the tokenizer for texts that continue others; `None` if it adds no space before a text.
pub(super) fn continuing(tokenizer: &Tokenizer) -> Result<Option<Continuing>, String> {
    let normalizer = described(tokenizer.get_normalizer());
    let prepends = steps(&normalizer).iter().any(is_prepend);
    let scheme = match tokenizer.get_pre_tokenizer() {
        Some(PreTokenizerWrapper::Metaspace(metaspace)) => metaspace.prepend_scheme,
        _ => PrependScheme::Never,
    };
    if !prepends && scheme == PrependScheme::Never {
        return Ok(None);
    }
    let mut tokenizer = tokenizer.clone();
    if prepends {
        let rest: Vec<Value> = steps(&normalizer).into_iter().filter(|step| !is_prepend(step)).collect();
        let rest = json!({"type": "Sequence", "normalizers": rest});
        let rest: NormalizerWrapper = serde_json::from_value(rest).map_err(|error| error.to_string())?;
        tokenizer.with_normalizer(Some(rest)).map_err(|error| error.to_string())?;
    }
    if let Some(PreTokenizerWrapper::Metaspace(metaspace)) = tokenizer.get_pre_tokenizer() {
        let mut metaspace = metaspace.clone();
        metaspace.set_prepend_scheme(PrependScheme::Never);
        tokenizer.with_pre_tokenizer(Some(metaspace));
    }
    Ok(Some(Continuing { tokenizer, after_special: prepends || scheme == PrependScheme::Always }))
}

/// Whether only added tokens have a space after another character. Then nothing is merged across such a place.
pub(super) fn is_apart(tokenizer: &Tokenizer) -> bool {
    let added = tokenizer.get_added_vocabulary().get_vocab();
    tokenizer.get_vocab(false).keys().all(|token| begins_with_spaces(token) || added.contains_key(token))
}

/// Whether a token has spaces only at its beginning, or none.
pub(super) fn begins_with_spaces(token: &str) -> bool {
    !token.trim_start_matches(SPACE).contains(SPACE)
}

fn described<T: serde::Serialize>(part: Option<&T>) -> Value {
    serde_json::to_value(part).unwrap_or_default()
}

/// Returns the name of a part for an error message.
fn kind(part: &Value) -> String {
    let name = |part: &Value| part["type"].as_str().unwrap_or("none").to_owned();
    match part["normalizers"].as_array().or_else(|| part["decoders"].as_array()) {
        Some(parts) => format!("{} of {}", name(part), parts.iter().map(name).collect::<Vec<_>>().join(", ")),
        None => name(part),
    }
}

fn is_decoder(decoder: Option<&DecoderWrapper>) -> bool {
    let decoder = described(decoder);
    let replaces =
        |step: &Value| step["type"] == "Replace" && step["pattern"]["String"] == json!(SPACE) && step["content"] == " ";
    let strips = |step: &Value| {
        let counts = [&step["start"], &step["stop"]].map(Value::as_u64);
        step["type"] == "Strip" && step["content"] == " " && matches!(counts, [Some(0 | 1), Some(0)])
    };
    let known =
        |step: &Value| replaces(step) || strips(step) || step["type"] == "ByteFallback" || step["type"] == "Fuse";
    match decoder["decoders"].as_array() {
        Some(steps) => steps.iter().all(known) && steps.iter().any(replaces),
        None => is_metaspace(&decoder),
    }
}

/// Returns the normalizers that a normalizer consists of.
fn steps(normalizer: &Value) -> Vec<Value> {
    match normalizer["normalizers"].as_array() {
        Some(steps) => steps.clone(),
        None if normalizer.is_null() => Vec::new(),
        None => vec![normalizer.clone()],
    }
}

fn is_replace(step: &Value) -> bool {
    step["type"] == "Replace" && step["pattern"]["String"] == " " && step["content"] == json!(SPACE)
}

fn is_prepend(step: &Value) -> bool {
    step["type"] == "Prepend" && step["prepend"] == json!(SPACE)
}

fn is_split_at_spaces(part: &Value) -> bool {
    part["type"] == "Split" && part["pattern"]["String"] == " " && part["invert"] == false
}

fn is_metaspace(part: &Value) -> bool {
    part["type"] == "Metaspace" && part["replacement"] == json!(SPACE)
}

#[cfg(test)]
mod tests;
