//! Chat templates: whole conversations, messages added to a stored conversation, and templates that are broken or never
//! end. The expected texts come from Jinja2.

use std::fs;
use std::path::Path;
use std::time::Instant;

use proptest::prelude::*;
use serde_json::json;
use tidegate_server::text::{After, ChatError, ChatTemplate, Message, TemplateInput};

const ALTERNATING: &str = include_str!("templates/alternating.jinja");
const HEADED: &str = include_str!("templates/headed.jinja");
const LINES: &str = include_str!("templates/lines.jinja");
const MARKED: &str = include_str!("templates/marked.jinja");

fn load(source: &str) -> ChatTemplate {
    let folder = tempfile::tempdir().unwrap();
    let config = json!({"bos_token": "<s>", "eos_token": {"content": "</s>", "special": true}, "pad_token": null,
        "chat_template": source});
    fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    ChatTemplate::load(folder.path()).unwrap().unwrap()
}

fn shipped() -> ChatTemplate {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("weights/checkpoints/tidegate-tiny");
    ChatTemplate::load(&folder).unwrap().unwrap()
}

fn message(role: &str, content: &str) -> Message {
    Message { role: role.into(), content: content.into(), ..Message::default() }
}

/// Returns the templates. Each has a name, the text between a prompt and an answer, and whether the template renders a
/// conversation that is only a system message.
fn all() -> [(&'static str, ChatTemplate, &'static str, bool); 5] {
    [
        ("alternating", load(ALTERNATING), " ", false),
        ("headed", load(HEADED), "", true),
        ("lines", load(LINES), "", true),
        ("marked", load(MARKED), "", true),
        ("shipped", shipped(), "", true),
    ]
}

fn long() -> Vec<Message> {
    vec![
        message("system", "Be <kind>."),
        message("user", " Hi & \"bye\"\n"),
        message("assistant", "Hello\n\nyou"),
        message("user", "Go on"),
    ]
}

#[test]
fn a_conversation_is_rendered_like_jinja2_does() {
    let whole = |source| load(source).render(&long()).unwrap();
    assert_eq!(whole(ALTERNATING), "<s>[INST] Be <kind>.\n\nHi & \"bye\" [/INST] Hello\n\nyou</s>[INST] Go on [/INST]");
    assert_eq!(
        whole(HEADED),
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe <kind>.<|eot_id|><|start_header_id|>user<|end_header_id|>\
         \n\nHi & \"bye\"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHello\n\nyou<|eot_id|>\
         <|start_header_id|>user<|end_header_id|>\n\nGo on<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    );
    assert_eq!(
        whole(LINES),
        "<|system|>\nBe <kind>.</s>\n<|user|>\n Hi & \"bye\"\n</s>\n<|assistant|>\nHello\n\nyou</s>\n<|user|>\n\
         Go on</s>\n<|assistant|>\n"
    );
    assert_eq!(
        load(MARKED).render(&long()[1..]).unwrap(),
        "<|im_start|>system\nYou tell stories.<|im_end|>\n<|im_start|>user\n Hi & \"bye\"\n<|im_end|>\n\
         <|im_start|>assistant\nHello\n\nyou<|im_end|>\n<|im_start|>user\nGo on<|im_end|>\n<|im_start|>assistant\n"
    );
    let closed = |source| load(source).render_closed(&long()[1..3]).unwrap();
    assert_eq!(closed(ALTERNATING), "<s>[INST] Hi & \"bye\" [/INST] Hello\n\nyou</s>");
    assert_eq!(closed(LINES), "<|user|>\n Hi & \"bye\"\n</s>\n<|assistant|>\nHello\n\nyou</s>\n");
}

#[test]
fn the_shipped_template_joins_messages_as_paragraphs() {
    let template = shipped();
    assert_eq!(template.render(&long()).unwrap(), "Be <kind>.\n\nHi & \"bye\"\n\nHello\n\nyou\n\nGo on\n\n");
    assert_eq!(template.render_closed(&long()[..2]).unwrap(), "Be <kind>.\n\nHi & \"bye\"");
    assert_eq!(template.render_more(&[message("user", "And then?")], After::Answer).unwrap(), "\n\nAnd then?\n\n");
    assert_eq!(template.render_more(&[message("user", "And then?")], After::Messages).unwrap(), "\n\nAnd then?\n\n");
    assert_eq!(template.render_more(&[], After::Messages).unwrap(), "\n\n");
}

#[test]
fn added_text_begins_with_the_end_of_the_answer() {
    let more = |source, after| load(source).render_more(&[message("user", "more")], after).unwrap();
    assert_eq!(more(MARKED, After::Answer), "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n");
    assert_eq!(more(MARKED, After::Messages), "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n");
    assert_eq!(more(ALTERNATING, After::Answer), "</s>[INST] more [/INST]");
    assert_eq!(more(ALTERNATING, After::Messages), "[INST] more [/INST]");
    assert_eq!(more(LINES, After::Answer), "</s>\n<|user|>\nmore</s>\n<|assistant|>\n");
}

#[test]
fn an_answer_can_be_requested_without_new_messages() {
    for (name, template, ..) in all() {
        let messages = vec![message("user", "Hi")];
        let closed = template.render_closed(&messages).unwrap();
        let more = template.render_more(&[], After::Messages).unwrap();
        assert_eq!(closed + &more, template.render(&messages).unwrap(), "{name}");
    }
}

#[test]
fn a_slice_that_ends_before_it_begins_does_not_panic() {
    // The template engine's arithmetic overflows here, which panics in builds with overflow checks.
    let rendered = load("{{ messages[0].content[1:9:-1] }}.").render(&[message("user", "abc")]);
    assert!(matches!(rendered.as_deref(), Ok(".") | Err(ChatError::Failed(_))), "{rendered:?}");
}

#[test]
fn a_refusal_contains_the_templates_message() {
    let template = load(ALTERNATING);
    let twice = [message("user", "a"), message("user", "b")];
    let reason = "after the system, roles must be user and assistant in turn";
    assert_eq!(template.render(&twice), Err(ChatError::Refused(reason.into())));
    assert_eq!(template.render_more(&twice, After::Answer), Err(ChatError::Refused(reason.into())));
    let error = template.render_more(&[message("assistant", "a")], After::Answer).unwrap_err();
    assert_eq!(error.to_string(), format!("the chat template refused the messages: {reason}"));
}

#[test]
fn a_message_that_would_be_lost_is_refused() {
    let template = load(ALTERNATING);
    let error = template.render_closed(&[message("system", "Be kind.")]).unwrap_err();
    assert_eq!(error, ChatError::Hidden { at: 0, role: "system".into() });
    assert_eq!(
        error.to_string(),
        "messages[0] (role system): the chat template shows this message only together with others"
    );

    let first = "{% for m in messages if m.role == 'system' %}{{ m.content }}|{% endfor %}";
    let then = "{% for m in messages if m.role != 'system' %}{{ m.content }}|{% endfor %}";
    let (sorted, new) = (load(&format!("{first}{then}")), [message("user", "a"), message("system", "b")]);
    let hidden = ChatError::Hidden { at: 1, role: "system".into() };
    assert_eq!(sorted.render_more(&new, After::Answer), Err(hidden));
    assert_eq!(sorted.render_more(&new, After::Messages), Err(ChatError::NotAppendable));
}

#[test]
fn a_template_that_hides_or_repeats_answers_cannot_continue_a_conversation() {
    for source in [
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content.upper() if m.role == 'assistant' else m.content }}{% endfor %}",
    ] {
        let error = load(source).render_more(&[message("user", "a")], After::Answer).unwrap_err();
        assert_eq!(error, ChatError::NotAppendable, "{source}");
    }
    let counted = load("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}");
    assert_eq!(counted.render_more(&[message("user", "a")], After::Messages), Err(ChatError::NotAppendable));
}

#[test]
fn an_endless_template_runs_out_of_steps() {
    let template = load("{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}");
    let start = Instant::now();
    assert_eq!(template.render(&long()), Err(ChatError::Steps));
    assert!(start.elapsed().as_secs() < 60);
    let inside = load(
        "{% macro m() %}{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}\
                       {% endmacro %}{{ m() }}",
    );
    let error = inside.render(&long()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the chat template must take at most 10000000 steps, and takes more for these messages"
    );
}

#[test]
fn a_recursive_template_is_stopped() {
    let template = load("{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}");
    // A quarter of a thread's default stack.
    let thread = std::thread::Builder::new().stack_size(512 << 10);
    let error = thread.spawn(move || template.render(&long())).unwrap().join().unwrap().unwrap_err();
    assert!(error.to_string().contains("recursion limit exceeded"), "{error}");
}

#[test]
fn a_huge_text_is_refused() {
    let template = load("{% for a in range(90000) %}{{ 'ten bytes.' * 200 }}{% endfor %}");
    let error = template.render(&long()).unwrap_err();
    assert_eq!(error, ChatError::Long);
    assert_eq!(
        error.to_string(),
        "the rendered chat must be at most 67108864 bytes long, and these messages give more"
    );
}

#[test]
fn messages_are_added_with_the_template_for_tools() {
    let folder = tempfile::tempdir().unwrap();
    let config = json!({"chat_template": [
        {"name": "default", "template": "{% for m in messages %}{{ m.content }};{% endfor %}"},
        {"name": "tool_use", "template": "{{ tools[0] }}:{% for m in messages %}{{ m.content }}!{% endfor %}"},
    ]});
    fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let (template, tools) = (ChatTemplate::load(folder.path()).unwrap().unwrap(), json!(["wrench"]));
    for (tools, after, added) in [
        (None, After::Answer, ";Go on;"),
        (None, After::Messages, "Go on;"),
        (Some(&tools), After::Answer, "!Go on!"),
        (Some(&tools), After::Messages, "Go on!"),
    ] {
        let input = TemplateInput { tools, ..TemplateInput::default() };
        let text = template.render_more_with(&[message("user", "Go on")], input, after).unwrap();
        assert_eq!(text, added, "{after:?}");
    }
}

#[test]
fn ten_thousand_messages_stay_within_the_step_limit() {
    let mut messages = Vec::new();
    for _ in 0..5_000 {
        messages.extend([message("user", "Go on"), message("assistant", "And so they went on")]);
    }
    for (name, template, ..) in all() {
        assert!(template.render_closed(&messages).is_ok_and(|text| text.len() > 100_000), "{name}");
    }
}

fn texts() -> impl Strategy<Value = String> {
    // Some templates trim spaces, so there are none at the ends. Inside are special tokens, braces, control characters
    // and many scripts.
    prop_oneof!["[a-z]{1,8}", r"[a-z<]([ -~\n]|\PC|<s>|</s>|\{\{|<\|im_end\|>){0,30}[a-z>]"]
}

/// Generates messages with alternating roles, sometimes after a system message. The last is the assistant's.
fn conversations() -> impl Strategy<Value = Vec<Message>> {
    let turns = prop::collection::vec((texts(), texts()), 2..5);
    (prop::option::of(texts()), turns).prop_map(|(system, turns)| {
        let mut messages: Vec<Message> = system.iter().map(|system| message("system", system)).collect();
        for (user, answer) in turns {
            messages.extend([message("user", &user), message("assistant", &answer)]);
        }
        messages
    })
}

proptest! {
    #[test]
    fn added_text_equals_the_difference_of_whole_renderings(messages in conversations(), cut in any::<prop::sample::Index>()) {
        for (name, template, lead, alone) in all() {
            // Before an answer, a conversation always ends with a user message.
            let all = &messages[..messages.len() - 1];
            let whole = template.render(all).unwrap();

            let answers: Vec<usize> = (0..all.len()).filter(|at| all[*at].role == "assistant").collect();
            let at = answers[cut.index(answers.len())];
            let first = template.render(&all[..at]).unwrap();
            let more = template.render_more(&all[at + 1..], After::Answer).unwrap();
            prop_assert_eq!(&format!("{first}{lead}{}{more}", all[at].content), &whole, "{} after an answer", name);

            let at = 1 + cut.index(all.len());
            if !alone && all[..at].iter().all(|message| message.role == "system") {
                continue;
            }
            let first = template.render_closed(&all[..at]).unwrap();
            let more = template.render_more(&all[at..], After::Messages).unwrap();
            prop_assert_eq!(&(first + &more), &whole, "{} after messages", name);
        }
    }
}
