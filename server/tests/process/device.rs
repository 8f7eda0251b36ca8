//! `--device` and `--backend` without a GPU (those of the machine are hidden): the messages and exit codes of refusals,
//! and the fallback to the CPU where any device may serve.

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// Whether this build could use a GPU.
const CUDA: bool = cfg!(feature = "cuda");

fn tidegate(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(args).current_dir(std::env::temp_dir()).stdin(Stdio::null());
    // Hides the devices of an installed driver.
    command.env("CUDA_VISIBLE_DEVICES", "-1").env_remove("TIDEGATE_DEVICE").env_remove("TIDEGATE_MODEL");
    command
}

/// Returns the exit code, standard output and standard error.
fn ended(output: Output) -> (Option<i32>, String, String) {
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

const GENERATE: [&str; 5] = ["generate", "Once", "--max-tokens", "5", "--seed=1"];
const BENCH: [&str; 7] = ["bench", "--depths=0", "--batch=1", "--prompt=0", "--steps=1", "--rounds=1", "--threads=1"];

#[test]
fn a_device_that_is_not_there_is_refused_with_an_exit_code_of_its_own() {
    let commands = [&["serve", "--port", "0"][..], &GENERATE, &BENCH, &["bench", "--shape", "12m"]];
    for command in commands {
        for (device, name) in [("cuda", "cuda:0"), ("cuda:7", "cuda:7")] {
            let data = tempfile::tempdir().unwrap();
            let mut command = tidegate(&[command, &["--device", device]].concat());
            let (code, text, error) = ended(command.env("TIDEGATE_DATA_DIR", data.path()).output().unwrap());
            assert_eq!((code, text.as_str()), (Some(3), ""), "{command:?}: {error}");
            let said = error.lines().last().unwrap();
            assert!(said.starts_with(&format!("error: --device {name}: ")), "{command:?}: {error}");
            let why = if CUDA {
                "choose cpu or auto, or one of the devices that nvidia-smi lists"
            } else {
                "does not support CUDA; "
            };
            assert!(said.contains(why) && said.contains("choose cpu or auto"), "{command:?}: {error}");
        }
    }
}

/// A flag or a variable chooses candle, with the same text; a device that a backend does not support is refused.
#[test]
fn the_backend_is_chosen_by_its_flag_or_variable() {
    let (code, text, error) = ended(tidegate(&GENERATE).args(["--backend", "candle"]).output().unwrap());
    assert_eq!(code, Some(0), "{error}");
    assert!(text.starts_with("Once") && text.len() > 8, "{text:?}");
    let (code, again, _) = ended(tidegate(&GENERATE).env("TIDEGATE_BACKEND", "candle").output().unwrap());
    assert_eq!((code, &again), (Some(0), &text));
    for (args, words) in [
        (
            ["--backend", "candle", "--device", "cuda"],
            "--device cuda:0: this build's candle backend does not support it",
        ),
        (
            ["--backend", "candle", "--device", "metal"],
            "--device metal: this build's candle backend does not support it",
        ),
        (["--backend", "native", "--device", "metal"], "add --backend candle, or choose cpu or auto"),
    ] {
        let (code, _, error) = ended(tidegate(&GENERATE).args(args).output().unwrap());
        assert_eq!(code, Some(3), "{args:?}: {error}");
        assert!(error.contains(words), "{args:?}: {error}");
    }
    let (code, table, error) = ended(tidegate(&BENCH).args(["--backend", "candle"]).output().unwrap());
    assert_eq!(code, Some(0), "{error}");
    assert!(table.contains(" by candle: one round.") && table.contains("| rfa-gate | f32 |"), "{table}");
    let (code, _, error) = ended(tidegate(&["bench", "--shape=12m", "--backend=candle"]).output().unwrap());
    assert_eq!(code, Some(1), "{error}");
    assert!(error.contains("--shape: random weights are for our own kernels"), "{error}");
}

#[test]
fn other_failures_have_other_exit_codes() {
    let (code, _, error) = ended(tidegate(&GENERATE).args(["--device", "gpu"]).output().unwrap());
    assert_eq!(code, Some(2), "{error}");
    assert!(error.contains("must be cpu, cuda, cuda:N (N counts the devices from 0), metal or auto"), "{error}");
    let (code, _, error) = ended(tidegate(&GENERATE).args(["--model", "/nowhere"]).output().unwrap());
    assert_eq!(code, Some(1), "{error}");
    let (_, help, _) = ended(tidegate(&["--help"]).output().unwrap());
    assert!(help.contains("3 the device named by --device"), "{help}");
}

#[test]
fn the_variable_names_a_device_and_the_flag_has_the_last_word() {
    let mut command = tidegate(&GENERATE);
    command.env("TIDEGATE_DEVICE", "cuda");
    assert_eq!(command.status().unwrap().code(), Some(3));
    assert_eq!(command.args(["--device", "cpu"]).status().unwrap().code(), Some(0));
}

#[test]
fn any_device_is_the_cpu_where_there_is_no_other() {
    let (code, on_cpu, error) = ended(tidegate(&GENERATE).args(["--device", "cpu"]).output().unwrap());
    assert_eq!(code, Some(0), "{error}");
    for more in [&["--device", "auto"][..], &[]] {
        let (code, text, error) = ended(tidegate(&GENERATE).args(more).output().unwrap());
        assert_eq!((code, &text), (Some(0), &on_cpu), "{error}");
        // A build without CUDA has no other device to try, so it does not warn.
        assert_eq!(error.contains("using the CPU: "), CUDA, "{error}");
    }
    let (code, text, error) = ended(tidegate(&BENCH).arg("--output=json").output().unwrap());
    assert_eq!(code, Some(0), "{error}");
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap()["device"], "cpu");
    assert_eq!(error.contains("using the CPU: "), CUDA, "{error}");
}

#[test]
fn the_log_says_which_device_serves() {
    let data = tempfile::tempdir().unwrap();
    let mut command = tidegate(&["serve", "--port", "0", "--log-format", "json", "--log", "info,tidegate=debug"]);
    let mut server = command.env("TIDEGATE_DATA_DIR", data.path()).stderr(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(server.stderr.take().unwrap()).lines();
    let mut log: Vec<Value> = Vec::new();
    for line in lines {
        log.push(serde_json::from_str(&line.unwrap()).unwrap());
        if log[log.len() - 1]["message"].as_str().unwrap().starts_with("listening on ") {
            break;
        }
    }
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(log.iter().any(|line| line["message"] == "model tidegate-tiny on cpu"), "{log:?}");
    let settings = log.iter().find(|line| line["message"] == "settings").unwrap();
    assert_eq!(settings["device"], "auto");
    let warned = |line: &&Value| line["level"] == "WARN" && line["message"].as_str().unwrap().contains("using the CPU");
    assert_eq!(log.iter().filter(warned).count(), usize::from(CUDA), "{log:?}");
}
