//! Grammars that a helper process compiles first. A compilation that cannot be stopped is killed with its helper, and
//! costs neither the server nor other grammars anything.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use tidegate_server::text::{GrammarError, GrammarSpec, Grammars, HelperCommand};

use super::bombs::bombs;
use super::drawn::{TOKENIZER, encode};

fn grammars(program: impl Into<OsString>, args: &[&str]) -> Grammars {
    let helper = HelperCommand { program: program.into(), args: args.iter().map(OsString::from).collect() };
    Grammars::with_helper(TOKENIZER.vocabulary(), TOKENIZER.eos(), &encode(), helper).unwrap()
}

fn helped() -> Grammars {
    grammars(env!("CARGO_BIN_EXE_tidegate"), &["compile-grammars"])
}

fn regex(regex: impl Into<String>) -> GrammarSpec {
    GrammarSpec::Regex(regex.into())
}

/// Returns a grammar that takes a minute and a gigabyte to compile unless something stops it.
fn bomb(first: char) -> GrammarSpec {
    regex(".*".repeat(7_900) + &format!("{first}x"))
}

#[test]
fn bombs_are_refused_and_leave_the_compilers_to_the_next_grammar() {
    let grammars = helped();
    // These are as many as are compiled at the same time. If they went on, nothing else could be compiled for a minute.
    thread::scope(|scope| {
        for first in ['0', '1'] {
            let grammars = &grammars;
            scope.spawn(move || {
                let error = grammars.compile(&bomb(first)).unwrap_err();
                assert!(matches!(error, GrammarError::Slow | GrammarError::Memory), "{error}");
            });
        }
    });
    assert!(grammars.compile(&regex("[0-9]+")).is_ok());
}

#[test]
fn what_a_helper_allows_is_what_is_compiled_and_what_it_refuses_has_the_same_reason() {
    let (plain, helped) = (Grammars::new(TOKENIZER.vocabulary(), TOKENIZER.eos(), &encode()).unwrap(), helped());
    for spec in [
        GrammarSpec::JsonObject,
        GrammarSpec::JsonSchema(json!({"type": "object", "properties": {"a": {"type": "number", "minimum": 0.1}}})),
        regex("(yes|no)"),
        regex("a("),
        GrammarSpec::Lark("start: missing".into()),
        GrammarSpec::Choice(vec!["a".into(), "\u{7f}".into()]),
        GrammarSpec::JsonSchema(json!({"type": "strange"})),
    ] {
        let [mut plain, mut helped] =
            [&plain, &helped].map(|it| it.compile(&spec).map(|grammar| grammar.start().mask().unwrap()));
        assert_eq!(plain.as_mut(), helped.as_mut(), "{spec:?}");
    }
}

#[test]
fn bombs_take_at_most_what_a_text_may_hold() {
    let grammars = helped();
    let mut followed = 0;
    for (name, spec) in bombs() {
        match grammars.compile(&spec) {
            Ok(compiled) => {
                followed += 1;
                let mut matcher = compiled.start();
                let Ok(mask) = matcher.mask() else { continue };
                let token = (1..4096).find(|id: &u32| mask[*id as usize / 32] >> (id % 32) & 1 == 1);
                let _ = token.map(|token| matcher.accept(token));
            }
            Err(error) => println!("{name}: {error}"),
        }
    }
    assert!(followed > 15, "{followed} were compiled");
}

#[test]
fn a_helper_that_cannot_start_is_reported() {
    let missing = grammars("/nonexistent/tidegate", &[]);
    assert_eq!(missing.compile(&regex("a")).unwrap_err(), GrammarError::Unavailable);
    assert!(missing.compile(&GrammarSpec::JsonObject).is_ok(), "what is known to be small needs no helper");
    let dies = grammars("/bin/false", &[]);
    assert_eq!(dies.compile(&regex("a")).unwrap_err(), GrammarError::Unavailable);
}

/// Returns grammars whose helpers append their process ids to the file `list` when they start.
fn listed(list: &Path) -> Grammars {
    let script = format!("echo $$ >> {}; exec {} compile-grammars", list.display(), env!("CARGO_BIN_EXE_tidegate"));
    grammars("/bin/sh", &["-c", &script])
}

/// Returns the process ids in `list`.
fn helpers(list: &Path) -> Vec<String> {
    fs::read_to_string(list).unwrap_or_default().lines().map(str::to_owned).collect()
}

#[test]
fn a_helper_is_used_again_and_replaced_when_something_ends_it() {
    let folder = tempfile::tempdir().unwrap();
    let list = folder.path().join("started");
    let (grammars, started) = (listed(&list), || helpers(&list));
    for count in 1..6 {
        grammars.compile(&regex(format!("a{{{count}}}"))).unwrap();
    }
    let helpers = started();
    assert_eq!(helpers.len(), 1, "one grammar after the other needs one helper");
    signal("-KILL", &helpers[0]);
    grammars.compile(&regex("b+")).unwrap();
    let helpers = started();
    assert_eq!(helpers.len(), 2, "it was killed before it was asked, or soon after");
    signal("-STOP", &helpers[1]);
    // The signal takes effect when the helper next runs. It must not answer before that.
    while !state(&helpers[1]).starts_with('T') {
        thread::yield_now();
    }
    thread::scope(|scope| {
        let compiling = scope.spawn(|| grammars.compile(&regex("c+")));
        thread::sleep(Duration::from_millis(100));
        signal("-KILL", &helpers[1]);
        assert!(compiling.join().unwrap().is_ok(), "what else ends a helper is no property of the grammar");
    });
    assert_eq!(started().len(), 3);
    drop(grammars);
    let pid = &started()[2];
    assert!(!Path::new(&format!("/proc/{pid}")).exists(), "a helper ends with its server");
}

#[test]
fn a_grammar_that_uses_up_its_helper_leaves_another_to_the_next_one() {
    let folder = tempfile::tempdir().unwrap();
    let list = folder.path().join("started");
    let grammars = listed(&list);
    assert!(grammars.compile(&bomb('0')).is_err());
    assert_eq!(helpers(&list).len(), 2, "the other one runs before anybody needs it");
    assert!(grammars.compile(&regex("[0-9]+")).is_ok());
    assert_eq!(helpers(&list).len(), 2);
}

#[test]
#[cfg(target_os = "linux")]
fn a_grammar_that_takes_long_gives_way_and_a_small_one_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let list = folder.path().join("started");
    let grammars = listed(&list);
    let own = Path::new("/proc/self/task");
    let usual = niceness(own).into_iter().max().unwrap();
    let lowered =
        |helper: &String| niceness(&Path::new("/proc").join(helper).join("task")).into_iter().min() > Some(usual);
    grammars.compile(&regex("[0-9]+")).unwrap();
    let first = helpers(&list);
    assert!(!lowered(&first[0]));
    thread::scope(|scope| {
        let compiling = scope.spawn(|| grammars.compile(&bomb('0')));
        while !lowered(&first[0]) {
            assert!(!compiling.is_finished(), "it was compiled at the usual priority");
            thread::sleep(Duration::from_millis(1));
        }
        // Meanwhile, another grammar has its own helper.
        grammars.compile(&regex("[a-z]+")).unwrap();
        assert!(!lowered(&helpers(&list)[1]));
    });
}

#[test]
#[cfg(target_os = "linux")]
fn what_has_taken_long_in_a_helper_gives_way_in_the_server_too() {
    let folder = tempfile::tempdir().unwrap();
    let list = folder.path().join("started");
    let grammars = listed(&list);
    grammars.compile(&regex("[0-9]+")).unwrap();
    let own = Path::new("/proc/self/task");
    let usual = niceness(own).into_iter().min();
    let gives_way = |tasks: &Path| niceness(tasks).into_iter().max() > usual;
    // Compiles ever larger grammars until one takes long enough.
    let mut count = 256;
    loop {
        let properties: Value = (0..count).map(|n| (format!("p{n}"), json!({"type": "string"}))).collect();
        let spec = GrammarSpec::JsonSchema(json!({"type": "object", "properties": properties}));
        let helper = Path::new("/proc").join(helpers(&list).last().unwrap()).join("task");
        let (mut in_helper, mut here) = (false, false);
        let compiled = thread::scope(|scope| {
            let compiling = scope.spawn(|| grammars.compile(&spec));
            while !compiling.is_finished() {
                (in_helper, here) = (in_helper || gives_way(&helper), here || gives_way(own));
                thread::sleep(Duration::from_millis(1));
            }
            compiling.join().unwrap()
        });
        match compiled {
            Ok(_) if in_helper => return assert!(here),
            Ok(_) => count += count / 4,
            // On a busy machine, a grammar that takes this long is refused.
            Err(error) => return assert_eq!(error, GrammarError::Slow),
        }
    }
}

/// Returns the nice value of each thread of a process.
#[cfg(target_os = "linux")]
fn niceness(tasks: &Path) -> Vec<i32> {
    let tasks = fs::read_dir(tasks).into_iter().flatten().flatten();
    let stat = tasks.filter_map(|task| fs::read_to_string(task.path().join("stat")).ok());
    // The nice value is the 17th field after the name, which may contain spaces.
    stat.filter_map(|stat| stat.rsplit_once(") ")?.1.split(' ').nth(16)?.parse().ok()).collect()
}

/// Returns the state of a process as `ps` prints it.
fn state(pid: &str) -> String {
    String::from_utf8(Command::new("ps").args(["-o", "state=", "-p", pid]).output().unwrap().stdout).unwrap()
}

fn signal(name: &str, pid: &str) {
    assert!(Command::new("kill").args([name, pid]).status().unwrap().success());
}
