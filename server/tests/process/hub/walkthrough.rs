//! The commands of docs/walkthrough.md, run as a reader would paste them, with a random RWKV-7 from a local hub.

use std::io::{BufRead, BufReader, Lines, Write};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};

use serde_json::{Value, json};

use super::server::{Files, Hub};
use crate::random::written_rwkv7;

const PAGE: &str = include_str!("../../../../docs/walkthrough.md");

/// The line printed after the output of a block.
const END: &str = "-- end of the block --";

/// A chat template like those of published RWKV-7 models: without tools, and without a role for tool results.
const TEMPLATE: &str = "{{ '<|rwkv_tokenizer_end_of_text|>' }}{% for m in messages %}\
{% if m.role in ['system', 'user', 'assistant'] %}{{ m.role | capitalize + ': ' + m.content + '\\n\\n' }}{% endif %}\
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}";

/// Returns the code blocks of the page, and whether each is left running.
fn blocks() -> impl Iterator<Item = (bool, &'static str)> {
    PAGE.split("\n```").skip(1).step_by(2).map(|block| match block.split_once('\n').unwrap() {
        ("sh", commands) => (false, commands),
        ("sh background", commands) => (true, commands),
        (other, _) => panic!("the test does not run blocks of {other}"),
    })
}

/// Returns a Bash command that inherits only `PATH` from this environment.
fn bash(home: &Path, hub: &Hub) -> Command {
    let built = Path::new(env!("CARGO_BIN_EXE_tidegate")).parent().unwrap().display();
    let path = format!("{built}:{}", std::env::var("PATH").unwrap());
    let mut command = Command::new("bash");
    command.env_clear().env("PATH", path).env("HOME", home).env("HF_HOME", home.join("hf"));
    command.env("HF_ENDPOINT", format!("http://{}", hub.address)).current_dir(home);
    command
}

/// Commands in a process group of their own, which is killed at the end, and their log.
struct Background {
    child: Child,
    lines: Lines<BufReader<ChildStderr>>,
}

impl Background {
    /// Starts a server and returns it with its port.
    fn start(mut bash: Command, commands: &str) -> (Self, String) {
        bash.args(["-c", commands]).stdin(Stdio::null()).stderr(Stdio::piped()).process_group(0);
        let mut child = bash.spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let (mut server, mut log) = (Self { child, lines }, Vec::new());
        for line in server.lines.by_ref().map_while(Result::ok) {
            if let Some((_, rest)) = line.split_once("listening on http://127.0.0.1:") {
                let port = rest.split(',').next().unwrap().to_owned();
                return (server, port);
            }
            log.push(line);
        }
        panic!("{commands} does not listen: {log:#?}");
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        let _ = Command::new("kill").args(["-KILL", "--", &format!("-{}", self.child.id())]).status();
        let _ = self.child.wait();
    }
}

/// A Bash process used as a terminal. It ends with the test's process, which closes its input.
struct Terminal {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Terminal {
    fn open(mut bash: Command) -> Self {
        let mut child = bash.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut terminal = Self { child, lines };
        terminal.run("exec 2>&1; set -eo pipefail");
        terminal
    }

    /// Runs commands and returns what they print. Later commands see their variables.
    fn run(&mut self, commands: &str) -> String {
        let input = self.child.stdin.as_mut().unwrap();
        writeln!(input, "{{\n{commands}\n}} < /dev/null\necho '{END}'").unwrap();
        let mut output = Vec::new();
        for line in self.lines.by_ref().map_while(Result::ok) {
            if line == END {
                return output.join("\n");
            }
            output.push(line);
        }
        panic!("{commands}\nfails: {output:#?}");
    }
}

fn answer(output: &str) -> Value {
    let answer: Value = serde_json::from_str(output).unwrap_or_else(|error| panic!("{error}: {output}"));
    assert!(answer["error"].is_null(), "{answer}");
    answer
}

#[test]
fn the_walk_through_does_what_it_says() {
    for program in ["bash", "curl"] {
        if Command::new(program).arg("--version").stdout(Stdio::null()).status().is_err() {
            eprintln!("skipped: {program} does not start");
            return;
        }
    }
    let (model, home) = (written_rwkv7(), tempfile::tempdir().unwrap());
    let config = json!({"tokenizer_class": "RwkvTokenizer", "chat_template": TEMPLATE}).to_string();
    let files = ["config.json", "model.safetensors", "rwkv_vocab_v20230424.txt"];
    let files = files.iter().fold(Files::default().with("tokenizer_config.json", config), |files, name| {
        files.with(name, std::fs::read(model.path().join(name)).unwrap())
    });
    let hub = Hub::start(files);
    let mut terminal = Terminal::open(bash(home.path(), &hub));
    let (mut ports, mut servers, mut outputs) = (["8080", "8081"].into_iter(), Vec::new(), Vec::new());
    // The ports of the page may be in use on this machine, so the servers choose others.
    let mut chosen: Vec<(String, String)> = Vec::new();
    for (is_background, commands) in blocks() {
        if is_background {
            let port = ports.next().unwrap();
            let flag = format!("--port {port}");
            assert!(commands.contains(&flag), "{commands}");
            let (server, number) = Background::start(bash(home.path(), &hub), &commands.replace(&flag, "--port 0"));
            servers.push(server);
            chosen.push((format!("127.0.0.1:{port}"), format!("127.0.0.1:{number}")));
        } else {
            let commands =
                chosen.iter().fold(commands.to_owned(), |commands, (page, here)| commands.replace(page, here));
            outputs.push(terminal.run(&commands));
        }
    }
    let [pulled, id, chat, best, tag, call, result, rewound, file, moved] = &outputs[..] else {
        panic!("the page has other blocks: {outputs:#?}");
    };
    assert!(Path::new(pulled.lines().last().unwrap()).starts_with(home.path().join("hf")), "{pulled}");
    assert!(id.trim().starts_with("ses_") && !id.contains('"'), "{id}");
    let [chat, best, tag, call, result, rewound] =
        [chat, best, tag, call, result, rewound].map(|output| answer(output));
    for turn in [&chat, &best, &call, &result] {
        assert_eq!((&turn["session"]["id"], &turn["session"]["recomputed_tokens"]), (&json!(id.trim()), &json!(0)));
    }
    assert!(chat["choices"][0]["message"]["content"].is_string(), "{chat}");
    let scores: Vec<f64> =
        best["choices"].as_array().unwrap().iter().map(|choice| choice["mean_logprob"].as_f64().unwrap()).collect();
    let chosen = usize::try_from(best["session"]["chosen"].as_u64().unwrap()).unwrap();
    assert!(scores.len() == 5 && scores.iter().all(|score| *score <= scores[chosen]), "{best}");
    let called = &call["choices"][0]["message"]["tool_calls"][0]["function"];
    let arguments: Value = serde_json::from_str(called["arguments"].as_str().unwrap()).unwrap();
    assert!(called["name"] == "weather" && arguments["city"].is_string(), "{call}");
    let version = &best["session"]["version"];
    assert_eq!((&tag["version"], &call["session"]["parent"], &rewound["version"]), (version, version, version));
    assert!(result["session"]["parent"] == call["session"]["version"] && !file.is_empty(), "{result}");
    let (ids, same) = moved.trim().split_once('\n').unwrap();
    assert!(ids.starts_with("\"token_ids\":[") && !ids.contains("[]"), "{moved}");
    assert_eq!(same, "both servers wrote the same tokens");
}
