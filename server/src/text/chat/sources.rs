//! Where checkpoints keep their chat templates.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::text::error::TextError;
use crate::text::tokenizer::{SpecialToken, optional_json};

/// Special tokens of `tokenizer_config.json` that templates may name.
const TOKENS: [&str; 7] = ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"];

/// The template for requests with tools, in the folder of `chat_template.jinja`.
pub const TOOL_TEMPLATE: &str = "additional_chat_templates/tool_use.jinja";

/// A template, not yet compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplateSource {
    /// The file it is from, for errors.
    pub path: PathBuf,
    /// The template.
    pub text: String,
}

/// The chat templates of a model, not yet compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplateSources {
    /// The template.
    pub default: TemplateSource,
    /// The template for requests whose answer may call tools, if they have their own.
    pub with_tools: Option<TemplateSource>,
    /// The special tokens that templates may name.
    pub tokens: Vec<(&'static str, String)>,
}

impl TemplateSources {
    /// Reads the templates of the checkpoint in `folder`: the file `chat_template.jinja`, or else `chat_template` in
    /// `tokenizer_config.json` (a string, or a list of named templates with a `default`), in the order of
    /// `transformers`. Returns `None` if there is neither. The template for tools is [`TOOL_TEMPLATE`] beside the
    /// file, or `tool_use` in the list.
    ///
    /// # Errors
    /// A file cannot be read or parsed.
    pub fn find(folder: &Path) -> Result<Option<Self>, TextError> {
        let config = folder.join("tokenizer_config.json");
        let bad = |reason: String| TextError::Contents { path: config.clone(), reason };
        let mut values: Map<String, Value> = optional_json(&config)?.unwrap_or_default();
        let mut tokens = Vec::new();
        for name in TOKENS {
            let token = values.remove(name).map(Option::<SpecialToken>::deserialize).transpose();
            let token =
                token.map_err(|_| bad(format!("{name} must be a text, or an object with the text as content")))?;
            tokens.extend(token.flatten().map(|token| (name, token.into_text())));
        }
        let listed = values.remove("chat_template").map(Option::<Templates>::deserialize).transpose();
        let listed = listed.map_err(|error| bad(error.to_string()))?.flatten();
        let within = |text| TemplateSource { path: config.clone(), text };
        let (default, with_tools) = match (read(folder.join("chat_template.jinja"))?, listed) {
            (Some(file), _) => (file, read(folder.join(TOOL_TEMPLATE))?),
            (None, Some(Templates::One(text))) => (within(text), None),
            (None, Some(Templates::Named(mut list))) => {
                let mut named = |name: &str| {
                    let at = list.iter().position(|named| named.name == name)?;
                    Some(within(list.swap_remove(at).template))
                };
                let default = named("default");
                (
                    default.ok_or_else(|| bad("chat_template must have a template named default".into()))?,
                    named("tool_use"),
                )
            }
            (None, None) => return Ok(None),
        };
        Ok(Some(Self { default, with_tools, tokens }))
    }
}

/// The value of `chat_template`, in Hugging Face's format.
#[derive(Deserialize)]
#[serde(untagged, expecting = "chat_template must be a text, or a list of objects with name and template")]
enum Templates {
    One(String),
    Named(Vec<Named>),
}

#[derive(Deserialize)]
struct Named {
    name: String,
    template: String,
}

/// Reads a template, if its file exists.
fn read(path: PathBuf) -> Result<Option<TemplateSource>, TextError> {
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(Some(TemplateSource { path, text })),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TextError::Read { path, source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::{ChatTemplate, Message, TemplateInput};

    fn write(folder: &Path, config: &Value) {
        std::fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
    }

    /// What the templates in `folder` write for a conversation without tools, and for one with them.
    fn written(folder: &Path) -> [String; 2] {
        let template = ChatTemplate::load(folder).unwrap().expect("there is a template");
        let (hi, tools) = ([Message { content: "Hi".into(), ..Message::default() }], serde_json::json!(["wrench"]));
        [None, Some(&tools)]
            .map(|tools| template.render_with(&hi, TemplateInput { tools, ..TemplateInput::default() }).unwrap())
    }

    fn complaint(folder: &Path) -> String {
        ChatTemplate::load(folder).err().expect("the template is wrong").to_string()
    }

    #[test]
    fn a_template_is_found_wherever_checkpoints_put_it() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        assert!(ChatTemplate::load(folder).unwrap().is_none());
        write(folder, &serde_json::json!({"bos_token": {"content": "<s>"}, "chat_template": null}));
        assert!(ChatTemplate::load(folder).unwrap().is_none());
        let named = |name: &str| serde_json::json!({"name": name, "template": name});
        write(folder, &serde_json::json!({"chat_template": [named("tool_use"), named("default")]}));
        assert_eq!(written(folder), ["default", "tool_use"]);
        write(folder, &serde_json::json!({"eos_token": "</s>", "chat_template": "{{ eos_token }}text"}));
        assert_eq!(written(folder), ["</s>text", "</s>text"]);
        // The file comes first, as in `transformers`: a repository may have mended its template there.
        std::fs::write(folder.join("chat_template.jinja"), "{{ bos_token }}file{{ eos_token }}").unwrap();
        assert_eq!(written(folder), ["file</s>", "file</s>"]);
        std::fs::create_dir(folder.join("additional_chat_templates")).unwrap();
        std::fs::write(folder.join(TOOL_TEMPLATE), "{{ tools[0] }}{{ eos_token }}").unwrap();
        assert_eq!(written(folder), ["file</s>", "wrench</s>"]);
    }

    #[test]
    fn errors_name_the_file_of_a_broken_template() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        std::fs::write(folder.join("chat_template.jinja"), "line\n{% for %}").unwrap();
        let error = complaint(folder);
        assert!(error.contains("chat_template.jinja: chat template: syntax error"), "{error}");
        assert!(error.contains("chat_template:2"), "the line: {error}");
        std::fs::remove_file(folder.join("chat_template.jinja")).unwrap();
        for (config, part) in [
            (serde_json::json!({"chat_template": "{{ a"}), "chat template: syntax error"),
            (serde_json::json!({"chat_template": "(".repeat(3) + "{{ " + &"(".repeat(1000)}), "chat template: "),
            (serde_json::json!({"chat_template": 7}), "chat_template must be a text, or a list"),
            (
                serde_json::json!({"chat_template": [{"name": "tool_use", "template": ""}]}),
                "must have a template named default",
            ),
            (
                serde_json::json!({"chat_template": [
                    {"name": "default", "template": ""}, {"name": "tool_use", "template": "{{ a"}
                ]}),
                "chat template tool_use: syntax error",
            ),
            (serde_json::json!({"bos_token": 7}), "bos_token must be a text"),
        ] {
            write(folder, &config);
            let error = complaint(folder);
            assert!(error.contains("tokenizer_config.json: ") && error.contains(part), "{error}");
        }
    }
}
