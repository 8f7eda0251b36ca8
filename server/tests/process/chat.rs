//! `tidegate chat` with lines from a pipe: turns, branches, files, and what is stored.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::live::Server;

/// The flags shared with a server that reads the stored conversations.
const SERVER: [&str; 4] = ["--device", "cpu", "--threads", "1"];

/// A `tidegate` command whose answers have exactly `tokens` tokens.
fn tidegate(command: &str, tokens: &str) -> Command {
    let mut tidegate = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    tidegate.args([command, "--max-tokens", tokens, "--ignore-eos"]).args(SERVER).current_dir(std::env::temp_dir());
    tidegate.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    tidegate
}

/// The exit code of a process, and what it printed.
struct Talk {
    code: Option<i32>,
    answers: String,
    notes: String,
}

impl Talk {
    fn of(mut child: Child, lines: &str) -> Self {
        // Fails if the process has already ended; its output says why.
        let _ = child.stdin.take().unwrap().write_all(lines.as_bytes());
        let output = child.wait_with_output().unwrap();
        let [answers, notes] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        Self { code: output.status.code(), answers, notes }
    }

    /// Returns the id of the conversation, which the last line names.
    fn session(&self) -> String {
        let last = self.notes.lines().last().unwrap_or_default();
        let id =
            last.strip_prefix("kept as ").and_then(|rest| rest.split_once("; to continue: tidegate chat --session "));
        let (id, again) = id.unwrap_or_else(|| panic!("no conversation was kept: {}", self.notes));
        assert!(again.starts_with(id), "{last}");
        id.to_owned()
    }

    /// Returns the lines of the last tree drawn.
    fn tree(&self) -> Vec<&str> {
        let lines: Vec<&str> = self.answers.lines().collect();
        let start = lines.iter().rposition(|line| line.ends_with("  0 tokens")).unwrap();
        lines[start..].iter().copied().take_while(|line| line.contains(" tokens")).collect()
    }
}

/// Runs a conversation of these lines, stored in `data`.
fn chat(data: &Path, flags: &[&str], lines: &str) -> Talk {
    Talk::of(tidegate("chat", "6").arg("--data-dir").arg(data).args(flags).spawn().unwrap(), lines)
}

#[test]
fn a_conversation_goes_on_in_another_process_as_if_it_had_never_ended() {
    let data = tempfile::tempdir().unwrap();
    let whole = chat(data.path(), &["--seed", "7"], "Once upon a time\nThe fox\n");
    assert_eq!(whole.code, Some(0), "{}", whole.notes);
    let first = chat(data.path(), &["--seed", "7"], "Once upon a time\n");
    let id = first.session();
    let second = chat(data.path(), &["--session", &id], "\nThe fox\n");
    assert_eq!((second.code, second.session()), (Some(0), id.clone()), "{}", second.notes);
    assert!(!first.answers.trim().is_empty() && !second.answers.trim().is_empty());
    assert_eq!(whole.answers, first.answers + &second.answers);
    assert!(whole.notes.contains(&format!("--data-dir {}", data.path().display())), "{}", whole.notes);
    // `--max-tokens` cuts the answers off, so the last one can be continued.
    let more = chat(data.path(), &["--session", &id], "/more\n");
    assert!(more.code == Some(0) && !more.answers.trim().is_empty(), "{}", more.notes);

    let missing = chat(data.path(), &["--session", &id.replace("ses_", "ses_0")[..36]], "Hello\n");
    assert_eq!(missing.code, Some(1));
    assert!(missing.notes.ends_with(": no session has this id\n"), "{}", missing.notes);
}

#[test]
fn branches_are_drawn_and_a_wrong_command_changes_nothing() {
    let data = tempfile::tempdir().unwrap();
    let lines = "Once upon a time\nThe fox\n/fork night\nThe owl\n/rewind 2\nThe mouse\n/tree\n";
    let talk = chat(data.path(), &["--seed", "7"], lines);
    assert_eq!(talk.code, Some(0), "{}", talk.notes);
    assert!(talk.notes.contains("now in branch ses_") && talk.notes.contains("now at version"), "{}", talk.notes);
    let tree = talk.tree();
    let [empty, once, fox, owl, mouse] = tree[..] else { panic!("five versions: {}", talk.answers) };
    assert!(empty.starts_with("o ") && empty.ends_with("  0 tokens"), "{empty}");
    assert!(once.starts_with("o ") && once.ends_with("\"Once upon a time\""), "{once}");
    assert!(fox.starts_with("├─o ") && fox.contains("\"The fox\"  [") && !fox.contains("night"), "{fox}");
    assert!(owl.starts_with("│ o ") && owl.ends_with("\"The owl\""), "{owl}");
    assert!(mouse.starts_with("└─* ") && mouse.ends_with("\"The mouse\"  [night]"), "{mouse}");

    // The first branch has not moved since the fork, and a version can be named as the tree shows it.
    let first = fox.split('[').nth(1).unwrap().trim_end_matches(']');
    let owl = owl.split_whitespace().nth(2).unwrap();
    let lines = format!("/switch {first}\n/rewind\n/switch night\n/rewind {owl}\n/tree\n");
    let moved = chat(data.path(), &["--session", &talk.session()], &lines);
    assert_eq!(moved.code, Some(0), "{}", moved.notes);
    let tree = moved.tree();
    assert!(tree[1].contains(&format!("[{first}]")) && tree[3].starts_with("│ * "), "{tree:?}");

    let wrong = "/sing\n/save\n/rewind 99\n/rewind zzz\n/switch zzz\n/load /nowhere\n/more now\n/help\nThe end\n";
    let wrong = chat(data.path(), &["--session", &moved.session()], wrong);
    assert_eq!(wrong.code, Some(1));
    let errors: Vec<&str> = wrong.notes.lines().filter(|line| line.starts_with("error: ")).collect();
    for (error, words) in errors.iter().zip([
        "there is no command /sing",
        "/save needs FILE",
        "there are only 3 turns to go back",
        "there is no version `zzz`",
        "there is no branch `zzz`",
        "cannot read /nowhere",
        "/more takes nothing after it",
    ]) {
        assert!(error.contains(words), "{error}: {words}");
    }
    assert_eq!(errors.len(), 7, "{}", wrong.notes);
    let answer = wrong.answers.split("a message that begins with /\n").nth(1).unwrap();
    assert!(!answer.trim().is_empty(), "the conversation goes on: {}", wrong.answers);
    let early = chat(data.path(), &[], "/fork\n");
    assert_eq!((early.code, early.notes.as_str()), (Some(1), "error: the conversation has not begun yet\n"));
}

#[test]
fn a_conversation_is_saved_to_a_file_that_another_one_begins_with() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("fox.tidegate");
    let lines = format!("Once upon a time\n/save {0}\n/save {0}\nThe fox\n", file.display());
    let saved = chat(&folder.path().join("data"), &["--seed", "7"], &lines);
    assert!(saved.code == Some(1) && saved.notes.contains("exists already"), "{}", saved.notes);
    let lines = format!("/load {}\nThe fox\n", file.display());
    let child = tidegate("chat", "6").arg("--no-keep").env("XDG_DATA_HOME", "/dev/null").spawn().unwrap();
    let loaded = Talk::of(child, &lines);
    assert_eq!(loaded.code, Some(0), "{}", loaded.notes);
    assert!(saved.answers.ends_with(&loaded.answers) && !loaded.answers.trim().is_empty());
    assert!(!loaded.notes.contains("kept as"), "{}", loaded.notes);

    fs::write(&file, "no conversation").unwrap();
    let broken = chat(&folder.path().join("data"), &[], &format!("/load {}\n", file.display()));
    assert!(broken.code == Some(1) && broken.notes.starts_with("error: "), "{}", broken.notes);
    assert_eq!(broken.notes.lines().count(), 1, "no conversation has begun: {}", broken.notes);
}

#[test]
fn a_folder_that_a_server_uses_is_refused_with_a_way_out() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    let _server = Server::start(&data, &SERVER);
    let refused = chat(&data, &[], "Hello\n");
    assert_eq!((refused.code, refused.notes.lines().count()), (Some(1), 1), "{}", refused.notes);
    let start = format!("error: a server or another program uses the conversations in {}: ", data.display());
    assert!(refused.notes.starts_with(&start) && refused.notes.contains("--data-dir FOLDER"), "{}", refused.notes);
    for (flags, words) in [
        (&["--temperature", "9"][..], "error: temperature must be between 0 and 2, found 9\n"),
        (&["--session", "../x"], "error: --session ../x: an id is `ses_` and 32 hexadecimal digits\n"),
    ] {
        let refused = chat(&folder.path().join("other"), flags, "Hello\n");
        assert_eq!((refused.code, refused.notes.as_str()), (Some(1), words));
    }
}

#[test]
fn an_interrupt_ends_the_answer_and_keeps_what_was_shown() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    let mut child = tidegate("chat", "1000000").arg("--data-dir").arg(&data).spawn().unwrap();
    // The pipe stays open, so only the interrupt ends the conversation.
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"Once upon a time\nThe fox\n").unwrap();
    let (mut shown, mut output) = (vec![0; 100], child.stdout.take().unwrap());
    output.read_exact(&mut shown).unwrap();
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    output.read_to_end(&mut shown).unwrap();
    let output = child.wait_with_output().unwrap();
    let notes = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{notes}");
    let talk = Talk { code: None, answers: String::new(), notes };
    let server = Server::start(&data, &SERVER);
    let messages = server.json("GET", &format!("/v1/sessions/{}/messages", talk.session()), &Value::Null);
    let said: Vec<&Value> = messages["data"].as_array().unwrap().iter().map(|message| &message["content"]).collect();
    let [Value::String(text), Value::String(answer)] = said[..] else { panic!("two messages: {messages}") };
    assert_eq!(text, "Once upon a time");
    assert_eq!(answer.trim_end(), String::from_utf8(shown).unwrap().trim_end());
}

/// Writes a copy of the shipped checkpoint without its chat template.
fn without_template(folder: &Path) -> PathBuf {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../weights/checkpoints/tidegate-tiny");
    let plain = folder.join("plain");
    fs::create_dir(&plain).unwrap();
    for name in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(shipped.join(name), plain.join(name)).unwrap();
    }
    let text = fs::read_to_string(shipped.join("tokenizer_config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config.as_object_mut().unwrap().remove("chat_template").unwrap();
    fs::write(plain.join("tokenizer_config.json"), config.to_string()).unwrap();
    plain
}

#[test]
fn a_model_without_a_chat_template_continues_the_text() {
    let folder = tempfile::tempdir().unwrap();
    let model = without_template(folder.path());
    let (model, data) = (model.to_str().unwrap(), folder.path().join("data"));
    let greedy = ["--model", model, "--temperature", "0"];
    let talk = chat(&data, &greedy, "Once upon a time\n");
    assert_eq!(talk.code, Some(0), "{}", talk.notes);
    assert!(
        talk.notes.lines().next().unwrap().contains("has no chat template: it continues the text"),
        "{}",
        talk.notes
    );
    assert!(talk.notes.contains(&format!("--model {model}")), "{}", talk.notes);
    let generated = Talk::of(tidegate("generate", "6").args(greedy).arg("Once upon a time").spawn().unwrap(), "");
    assert_eq!(format!("Once upon a time{}", talk.answers), generated.answers);

    let refused = chat(&data, &["--model", model, "--system", "Be brief."], "Hello\n");
    assert_eq!((refused.code, refused.notes.lines().count()), (Some(1), 1), "{}", refused.notes);
    assert!(refused.notes.starts_with("error: --system: this model has no chat template"), "{}", refused.notes);
}

#[test]
fn instructions_begin_the_conversation() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    let talk = chat(&data, &["--system", "Be brief."], "Hello\nAnd then?\n/rewind 2\nAgain\n");
    assert_eq!(talk.code, Some(0), "{}", talk.notes);
    let server = Server::start(&data, &SERVER);
    let messages = server.json("GET", &format!("/v1/sessions/{}/messages", talk.session()), &Value::Null);
    let roles: Vec<&str> = messages["data"].as_array().unwrap().iter().map(|it| it["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["system", "user", "assistant"], "after going back to the beginning they are said again");
}
