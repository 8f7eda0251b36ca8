//! Checks the workspace's sources: the opening comment and the length of each file, the direction of imports, import
//! cycles, and where `unsafe` is used. It reads only the text, without the compiler.
//!
//! Each rule is a function from a file's name and text to complaints, so that the tests below can check the rules too.

mod cycles;
mod layers;
mod source;

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use cycles::Crate;
use layers::{Layers, MODEL, SERVER};
use source::{code, tests_removed, words};

/// Maximum number of lines of a source file.
const LONGEST: usize = 400;

/// Folders and files that may use `unsafe`: for vector instructions, the memory map of a checkpoint, NVIDIA's driver
/// and compiler, and the GPU emulator.
const UNSAFE: [&str; 6] = [
    "model/src/kernels/",
    "model/src/checkpoint/mod.rs",
    "model/src/cuda/driver.rs",
    "model/src/cuda/host.rs",
    "model/src/cuda/kernels.rs",
    "model/src/cuda/queue.rs",
];

/// Folders, each with the paths that its code may not use, and the reason.
const FOREIGN: [(&str, &[&str], &str); 9] = [
    (
        "model/src/",
        &["tokio", "axum", "hyper", "tokenizers", "tidegate_server", "std::time", "Instant", "SystemTime", "rand::rng"],
        "the model knows no text, HTTP, clock or global random numbers",
    ),
    ("server/src/text", &["axum", "tokio"], "text knows no HTTP and no runtime"),
    ("server/src/engine", &["axum", "serde", "serde_json"], "the engine knows no wire type"),
    (
        "server/src/session/index",
        &["redb", "crate::session::embedded", "crate::session::postgres", "crate::session::store"],
        "the interface knows neither who implements it nor who uses it",
    ),
    ("server/src/session/store", &["redb"], "the store knows no database"),
    (
        "server/src/session/store",
        &["crate::session::embedded"],
        "only what opens a store knows an implementation of the index",
    ),
    ("server/src/metrics", &["axum", "tokio"], "metrics know no HTTP and no runtime"),
    ("weights/src/", &["axum", "tidegate_server", "tidegate_experiments"], "weights and server never meet"),
    ("weights/experiments/", &["axum", "tidegate_server"], "experiments and server never meet"),
];

/// Files of the model that may read the clock: the thread pool, which does not wait for a late thread, and measurements
/// of the machine.
const CLOCK: [&str; 2] = ["model/src/kernels/threads.rs", "model/src/kernels/roofline.rs"];

/// The file that chooses the implementation of a store's index.
const CHOOSES_INDEX: &str = "server/src/session/store/open.rs";

/// Folders of crates, each with the packages that its manifest may not name.
const NOT_NEEDED: [(&str, &[&str]); 4] = [
    ("model", &["tokio", "axum", "tokenizers", "tidegate-server", "tidegate-weights", "tidegate-experiments"]),
    ("server", &["tidegate-weights", "tidegate-experiments"]),
    ("weights", &["tidegate-server", "tidegate-experiments", "axum", "tokio"]),
    ("weights/experiments", &["tidegate-server", "axum", "tokio"]),
];

// ---- The rules

fn head(name: &str, text: &str) -> Option<String> {
    (!text.starts_with("//!")).then(|| format!("{name}: does not open with `//!` and a description"))
}

fn length(name: &str, text: &str) -> Option<String> {
    let lines = text.lines().count();
    (lines > LONGEST).then(|| format!("{name}: has {lines} lines, more than {LONGEST}"))
}

fn unsafety(name: &str, text: &str) -> Option<String> {
    let allowed = UNSAFE.iter().any(|place| name.starts_with(place));
    (!allowed && words(&code(text)).any(|word| word == "unsafe"))
        .then(|| format!("{name}: uses `unsafe` outside {}", UNSAFE.join(" and ")))
}

fn foreign(name: &str, text: &str) -> Vec<String> {
    let code = code(text);
    let rules = FOREIGN.iter().filter(|(folder, ..)| name.starts_with(folder));
    let may = |path: &str| match path {
        "std::time" | "Instant" => CLOCK.contains(&name),
        path => path == "crate::session::embedded" && name == CHOOSES_INDEX,
    };
    rules
        .flat_map(|(_, paths, why)| {
            let found = paths.iter().filter(|path| !may(path) && starts_path(&code, path));
            found.map(move |path| format!("{name}: uses {path}, but {why}"))
        })
        .collect()
}

/// Finds imports that break the order of layers. `folder` is the crate's `src/`. Its root files and tests may use every
/// module.
fn direction(layers: Layers, folder: &str, name: &str, text: &str) -> Vec<String> {
    let Some(module) = name.strip_prefix(folder).and_then(module_of) else {
        return Vec::new();
    };
    if name.ends_with("/tests.rs") {
        return Vec::new();
    }
    let code = tests_removed(&code(text));
    let Some((_, allowed)) = layers.iter().find(|(layer, _)| *layer == module) else {
        return vec![format!("{name}: the module {module} is not in the table of layers")];
    };
    let mut complaints: Vec<String> = uses(&code)
        .into_iter()
        .filter(|used| *used != module && !allowed.contains(used))
        .map(|used| format!("{name}: {module} may not use {used}"))
        .collect();
    let at_root = !name[folder.len()..].contains('/');
    if code.contains("super::super::") || (at_root && code.contains("super::")) {
        complaints.push(format!("{name}: uses another module by `super`; write `crate::`"));
    }
    complaints
}

fn manifest(folder: &str, text: &str) -> Vec<String> {
    let unwanted = NOT_NEEDED.iter().find(|(name, _)| *name == folder).map_or(&[][..], |(_, unwanted)| unwanted);
    let mut in_dependencies = false;
    let mut complaints = Vec::new();
    for line in text.lines() {
        if line.starts_with('[') {
            in_dependencies = line.contains("dependencies");
            continue;
        }
        let package = line.split(['.', '=', ' ']).next().unwrap_or(line);
        if in_dependencies && unwanted.contains(&package) {
            complaints.push(format!("{folder}/Cargo.toml: {folder} may not depend on {package}"));
        }
    }
    complaints
}

/// Finds import cycles between the files below `folder`.
fn cyclic(folder: &str, library: &str, sources: &[(String, String)]) -> Vec<String> {
    let files = Crate::new(folder, library, sources);
    let found = cycles::cycles(&files.imports());
    let complaint = |(cycle, files): (Vec<_>, _)| format!("import cycle, of {files} files: {}", cycle.join(" -> "));
    found.into_iter().map(complaint).collect()
}

// ---- Reading Rust

/// Returns the module of a path below `src/`, or `None` for the root of a crate.
fn module_of(path: &str) -> Option<&str> {
    let first = path.split('/').next()?;
    let module = first.strip_suffix(".rs").unwrap_or(first);
    (!["lib", "main", "bin"].contains(&module)).then_some(module)
}

/// Returns the modules that follow `crate::`: one, or several in braces.
fn uses(code: &str) -> Vec<&str> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        if code[..at].ends_with(['$', '_']) || code[..at].ends_with(char::is_alphanumeric) {
            continue; // `$crate` in a macro, or the end of another word
        }
        let rest = &code[at + "crate::".len()..];
        match rest.strip_prefix('{') {
            None => found.extend(words(rest).next()),
            Some(group) => found.extend(group_heads(group)),
        }
    }
    found
}

/// Returns the first word of each path in a group such as `a::b, c::{d, e}}`, whose opening brace has been removed.
fn group_heads(group: &str) -> Vec<&str> {
    let mut depth = 0;
    let mut heads = Vec::new();
    let mut start = 0;
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                heads.extend(words(&group[start..at]).next());
                start = at + 1;
                if c == '}' {
                    break;
                }
            }
            _ => {}
        }
    }
    heads
}

/// Returns whether a path in `code` starts with `path`, as `serde::Serialize` starts with `serde`, but `x::serde` and
/// `serde_json` do not.
fn starts_path(code: &str, path: &str) -> bool {
    code.match_indices(path).any(|(at, _)| {
        let begins = !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':');
        let after = &code[at + path.len()..];
        begins && (after.starts_with("::") || after.starts_with(';') || after.starts_with(" as "))
    })
}

// ---- The workspace

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in the workspace").to_owned()
}

/// Returns every file with one of these extensions: its path from the workspace's root, and its text.
fn sources(extensions: &[&str]) -> Vec<(String, String)> {
    let root = workspace();
    let mut folders: Vec<PathBuf> = ["model", "server", "weights"].map(|folder| root.join(folder)).into();
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("the folder can be read") {
            let path = entry.expect("the entry can be read").path();
            if path.is_dir() && !path.ends_with("target") {
                folders.push(path);
            } else if path.extension().and_then(OsStr::to_str).is_some_and(|end| extensions.contains(&end)) {
                let name = path.strip_prefix(&root).expect("below the root").to_string_lossy().replace('\\', "/");
                found.push((name, fs::read_to_string(&path).expect("a source file is UTF-8")));
            }
        }
    }
    assert!(found.len() >= 7, "only {} files of {extensions:?} below {}", found.len(), root.display());
    found
}

#[test]
fn the_workspace_is_tidy() {
    let mut complaints = Vec::new();
    let rust = sources(&["rs"]);
    for (name, text) in &rust {
        complaints.extend([head(name, text), length(name, text), unsafety(name, text)].into_iter().flatten());
        complaints.extend(foreign(name, text));
        complaints.extend(direction(MODEL, "model/src/", name, text));
        complaints.extend(direction(SERVER, "server/src/", name, text));
    }
    complaints.extend(cyclic("model/src/", "tidegate_model", &rust));
    complaints.extend(cyclic("server/src/", "tidegate_server", &rust));
    complaints.extend(cyclic("weights/src/", "tidegate_weights", &rust));
    complaints.extend(cyclic("weights/experiments/src/", "tidegate_experiments", &rust));
    complaints.extend(sources(&["js", "css", "html"]).iter().filter_map(|(name, text)| length(name, text)));
    for (folder, _) in NOT_NEEDED {
        let text = fs::read_to_string(workspace().join(folder).join("Cargo.toml")).expect("a crate has a manifest");
        complaints.extend(manifest(folder, &text));
    }
    assert!(complaints.is_empty(), "{} complaints:\n{}", complaints.len(), complaints.join("\n"));
}

#[test]
fn files_without_description_or_too_long_are_found() {
    assert!(head("a.rs", "//! What.\n").is_none());
    assert!(head("a.rs", "// What.\n").is_some());
    assert!(length("a.rs", &"\n".repeat(LONGEST)).is_none());
    assert!(length("a.rs", &"\n".repeat(LONGEST + 1)).is_some());
}

#[test]
fn unsafe_is_found_in_code_only() {
    assert!(unsafety("server/src/a.rs", "fn f() { unsafe { g() } }").is_some());
    assert!(unsafety("model/src/kernels/a.rs", "unsafe fn f() {}").is_none());
    for harmless in
        ["// unsafe\n", "/* unsafe */", "f(\"un\\\" unsafe\")", "r#\"a \" unsafe\"#", "unsafe_op", "'\"'; \"unsafe\""]
    {
        assert!(unsafety("server/src/a.rs", harmless).is_none(), "{harmless}");
    }
}

#[test]
fn imports_against_the_direction_are_found() {
    let complaints = |name: &str, text: &str| direction(MODEL, "model/src/", name, text).len();
    assert_eq!(complaints("model/src/mixers/chunk.rs", "use crate::{nn::floats, feature_map::{A, B}};"), 0);
    assert_eq!(complaints("model/src/mixers/chunk.rs", "use crate::{nn::floats, decoder::{A, B}, block};"), 2);
    assert_eq!(complaints("model/src/sampling/mod.rs", "fn f() { crate::config::g() }"), 1);
    assert_eq!(complaints("model/src/nn.rs", "use super::decoder::Decoder;"), 1);
    assert_eq!(complaints("model/src/mixers/chunk.rs", "use super::super::decoder::Decoder;"), 1);
    assert_eq!(complaints("model/src/mixers/chunk.rs", "use super::naive::N;"), 0);
    assert_eq!(complaints("model/src/mixers/chunk/tests.rs", "use crate::decoder::Decoder;"), 0);
    assert_eq!(complaints("model/src/novelty.rs", ""), 1);
    assert_eq!(complaints("model/src/lib.rs", "use crate::decoder::Decoder;"), 0);
    assert_eq!(complaints("model/src/nn.rs", "\n#[cfg(test)]\nmod tests { use crate::decoder::D; use super::*; }"), 0);
    assert_eq!(direction(SERVER, "server/src/", "server/src/text/mod.rs", "use crate::api::X;").len(), 1);
}

#[test]
fn foreign_crates_are_found() {
    assert_eq!(foreign("server/src/engine/a.rs", "use axum::Json; use serde::Serialize;").len(), 2);
    assert_eq!(foreign("server/src/api/a.rs", "use axum::Json;").len(), 0);
    assert_eq!(foreign("server/src/engine/a.rs", "#[derive(serde::Serialize)] // axum::Json\nstruct A;").len(), 1);
    assert_eq!(foreign("model/src/nn.rs", "let now = std::time::Instant::now();").len(), 1);
    assert_eq!(foreign("model/src/kernels/roofline.rs", "use std::time::Instant; let now = Instant::now();").len(), 0);
    assert_eq!(foreign("model/src/kernels/roofline.rs", "use std::time::SystemTime; SystemTime::now();").len(), 1);
    assert_eq!(foreign("model/src/nn.rs", "use my::tokio::x; use tokio_like::y;").len(), 0);
    assert_eq!(foreign("server/src/session/store/load.rs", "use crate::session::embedded::A;").len(), 1);
    assert_eq!(foreign("server/src/session/store/open.rs", "use crate::session::embedded::A;").len(), 0);
}

#[test]
fn dependencies_against_the_direction_are_found() {
    assert_eq!(manifest("server", "[dependencies]\ntidegate-weights.workspace = true\n").len(), 1);
    assert_eq!(manifest("weights", "[dev-dependencies]\ntidegate-server = { path = \"../server\" }\n").len(), 1);
    assert_eq!(manifest("weights", "[package]\nname = \"tidegate-server\"\n[lints]\nworkspace = true\n").len(), 0);
}

#[test]
fn the_tables_list_each_module_once() {
    for layers in [MODEL, SERVER] {
        let names: Vec<&str> = layers.iter().map(|(name, _)| *name).collect();
        for (at, (name, allowed)) in layers.iter().enumerate() {
            assert!(!names[..at].contains(name), "{name} is listed twice");
            assert!(
                allowed.iter().all(|used| names.contains(used)),
                "{name} may use a module that is not in the table"
            );
        }
    }
}
