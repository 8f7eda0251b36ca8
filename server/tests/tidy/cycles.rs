//! Import cycles between the files of one crate.
//!
//! A file imports another if it names an item that the other defines. A path is followed through folders and through
//! `pub use`. Naming a module, declaring one with `mod`, and re-exporting an item are not imports by themselves. Method
//! calls and trait implementations leave no path in the text, so they are not seen.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::source::{code, tests_removed};

/// The role of a path in a file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Part of an expression, a type or an attribute.
    Mention,
    /// `use …`
    Import,
    /// `pub use …`
    ReExport,
}

struct Path {
    segments: Vec<String>,
    /// The name in scope after a `use`; `*` for a glob.
    name: String,
    role: Role,
}

/// The files of a package by module path, such as `["api", "router"]`. The path of the library's root is empty, and
/// that of the binary's root is `["main"]`.
pub(super) struct Crate {
    modules: BTreeMap<Vec<String>, Module>,
    /// The name by which the binary refers to the library.
    crate_name: String,
}

struct Module {
    file: String,
    /// The text without comments, strings and tests.
    code: String,
    paths: Vec<Path>,
}

impl Crate {
    /// Reads the package whose files are in `folder`, which ends in `src/`. `crate_name` is the package's name in code.
    pub(super) fn new(folder: &str, crate_name: &str, sources: &[(String, String)]) -> Self {
        let mut modules: BTreeMap<Vec<String>, Module> = BTreeMap::new();
        for (name, text) in sources {
            let Some(path) = name.strip_prefix(folder).and_then(|path| path.strip_suffix(".rs")) else { continue };
            if path == "tests" || path.ends_with("/tests") || path.contains("tests/") {
                continue;
            }
            let mut segments: Vec<String> = path.split('/').map(str::to_owned).collect();
            let last = segments.last().map(String::as_str);
            if last == Some("mod") || path == "lib" {
                segments.pop();
            }
            let code = tests_removed(&code(text));
            modules.insert(segments, Module { file: name.clone(), paths: paths(&code), code });
        }
        Self { modules, crate_name: crate_name.to_owned() }
    }

    /// Returns each file with the files whose items it names.
    pub(super) fn imports(&self) -> BTreeMap<&str, BTreeSet<&str>> {
        let mut imports = BTreeMap::new();
        for (at, module) in &self.modules {
            let used = module.paths.iter().filter(|path| path.role != Role::ReExport || is_used(module, &path.name));
            let found = used.filter_map(|path| self.definer(at, &path.segments, path.name == "*", 0));
            let targets = found.filter(|target| *target != at).map(|target| self.modules[target].file.as_str());
            imports.insert(module.file.as_str(), targets.collect());
        }
        imports
    }

    /// Returns the module that defines the item to which a path in the module `at` leads; `None` if the path leads to a
    /// module or into another crate.
    fn definer(&self, at: &[String], path: &[String], glob: bool, depth: usize) -> Option<&Vec<String>> {
        let (first, mut rest) = path.split_first()?;
        let mut place = at.to_vec();
        match first.as_str() {
            "crate" => place = self.root(at),
            "self" => {}
            "super" => place = self.parent(at),
            name if name == self.crate_name => place.clear(),
            name if self.child(at, name).is_some() || self.alias(at, name).is_some() => rest = path,
            _ => return None,
        }
        while let Some((name, after)) = rest.split_first() {
            if name == "super" {
                place = self.parent(&place);
            } else if let Some(child) = self.child(&place, name) {
                place.clone_from(child);
            } else if let Some(alias) = self.alias(&place, name).filter(|_| depth < 8) {
                let through: Vec<String> = alias.iter().chain(after).cloned().collect();
                return self.definer(&place, &through, glob, depth + 1).or_else(|| self.key(&place).filter(|_| glob));
            } else {
                return self.globbed(&place, name, depth).or_else(|| self.key(&place));
            }
            rest = after;
        }
        self.key(&place).filter(|_| glob)
    }

    fn key(&self, place: &[String]) -> Option<&Vec<String>> {
        self.modules.get_key_value(place).map(|(key, _)| key)
    }

    fn child(&self, place: &[String], name: &str) -> Option<&Vec<String>> {
        let place = if place == ["main"] { &[] } else { place };
        self.key(&[place, &[name.to_owned()]].concat())
    }

    /// Returns the root that `crate` names in the module `at`.
    fn root(&self, at: &[String]) -> Vec<String> {
        let binary = vec!["main".to_owned()];
        let declares = |main: &Module| {
            let words: Vec<&str> = identifiers(&main.code).collect();
            words.windows(2).any(|pair| pair[0] == "mod" && at.first().is_some_and(|name| name == pair[1]))
        };
        if at == binary || self.modules.get(&binary).is_some_and(declares) { binary } else { Vec::new() }
    }

    fn parent(&self, at: &[String]) -> Vec<String> {
        if at.len() < 2 { self.root(at) } else { at[..at.len() - 1].to_vec() }
    }

    /// Returns the path that the module `place` imports as `name`.
    fn alias(&self, place: &[String], name: &str) -> Option<&[String]> {
        let mut imports = self.modules.get(place)?.paths.iter().filter(|path| path.role != Role::Mention);
        // Without the second condition, `use tracing::{self}` would lead to itself.
        imports.find(|path| path.name == name && path.segments != [name]).map(|path| path.segments.as_slice())
    }

    /// Returns the module that defines `name` among those that `place` imports with `use …::*`.
    fn globbed(&self, place: &[String], name: &str, depth: usize) -> Option<&Vec<String>> {
        let module = self.modules.get(place).filter(|_| depth < 8)?;
        let mut globs = module.paths.iter().filter(|path| path.name == "*" && path.role != Role::Mention);
        globs.find_map(|path| {
            let target = self.definer(place, &path.segments, true, depth + 1)?;
            defines(&self.modules[target].code, name).then_some(target)
        })
    }
}

/// Returns whether a module also uses an item that it re-exports.
fn is_used(module: &Module, name: &str) -> bool {
    identifiers(&module.code).filter(|word| *word == name).count() > 1
}

fn defines(code: &str, name: &str) -> bool {
    let words: Vec<&str> = identifiers(code).collect();
    let kinds = ["struct", "enum", "trait", "fn", "type", "const", "static", "union", "macro_rules"];
    words.windows(2).any(|pair| pair[1] == name && kinds.contains(&pair[0]))
}

fn identifiers(code: &str) -> impl Iterator<Item = &str> {
    tokens(code).filter(|token| is_identifier(token))
}

fn is_identifier(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Splits code into identifiers and numbers, `::`, and single other characters.
fn tokens(code: &str) -> impl Iterator<Item = &str> {
    let mut rest = code;
    std::iter::from_fn(move || {
        rest = rest.trim_start();
        let first = rest.chars().next()?;
        let word = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        let len = if word > 0 {
            word
        } else if rest.starts_with("::") {
            2
        } else {
            first.len_utf8()
        };
        let (token, after) = rest.split_at(len);
        rest = after;
        Some(token)
    })
}

/// Finds every path of two or more segments, and every `use`.
fn paths(code: &str) -> Vec<Path> {
    let tokens: Vec<&str> = tokens(code).collect();
    let (mut found, mut at) = (Vec::new(), 0);
    while at < tokens.len() {
        let before = at.checked_sub(1).map_or("", |before| tokens[before]);
        if tokens[at] == "use" {
            let role = if before == "pub" || before == ")" { Role::ReExport } else { Role::Import };
            at = tree(&tokens, at + 1, &[], role, &mut found);
        } else if is_identifier(tokens[at]) && !["::", ".", "$", "'"].contains(&before) {
            let mut segments = vec![tokens[at].to_owned()];
            while tokens.get(at + 1) == Some(&"::") && tokens.get(at + 2).is_some_and(|token| is_identifier(token)) {
                segments.push(tokens[at + 2].to_owned());
                at += 2;
            }
            if segments.len() > 1 {
                found.push(Path { segments, name: String::new(), role: Role::Mention });
            }
        }
        at += 1;
    }
    found
}

/// Reads one tree of a `use` that starts at `at`; returns where it ends.
fn tree(tokens: &[&str], mut at: usize, prefix: &[String], role: Role, found: &mut Vec<Path>) -> usize {
    let mut segments = prefix.to_vec();
    let mut name = None;
    while let Some(&token) = tokens.get(at) {
        match token {
            "::" => {}
            "{" => {
                while at < tokens.len() && tokens[at] != "}" {
                    at = tree(tokens, at + 1, &segments, role, found);
                }
                return at + 1;
            }
            "as" => {
                name = tokens.get(at + 1).map(|name| (*name).to_owned());
                at += 1;
            }
            "*" => name = Some("*".to_owned()),
            "self" if !segments.is_empty() => {}
            word if is_identifier(word) => segments.push(word.to_owned()),
            _ => break,
        }
        at += 1;
    }
    if segments.len() > prefix.len() || name.is_some() || tokens.get(at.wrapping_sub(1)) == Some(&"self") {
        let name = name.or_else(|| segments.last().cloned()).unwrap_or_default();
        found.push(Path { segments, name, role });
    }
    at
}

/// Returns, for each group of files that reach one another, a shortest cycle in import order, and the number of files
/// in the group.
pub(super) fn cycles<'a>(imports: &BTreeMap<&'a str, BTreeSet<&'a str>>) -> Vec<(Vec<&'a str>, usize)> {
    let reached: BTreeMap<&str, _> = imports.keys().map(|file| (*file, reach(imports, file))).collect();
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for &file in imports.keys() {
        if seen.contains(file) || !reached[file].contains_key(file) {
            continue;
        }
        let group: Vec<&str> =
            reached[file].keys().copied().filter(|other| reached[other].contains_key(file)).collect();
        let cycles = group.iter().map(|from| cycle(&reached[from], from));
        found.extend(cycles.min_by_key(Vec::len).map(|cycle| (cycle, group.len())));
        seen.extend(group);
    }
    found
}

/// Returns the files that `from` imports directly or indirectly, each with the file through which it is first reached.
fn reach<'a>(imports: &BTreeMap<&'a str, BTreeSet<&'a str>>, from: &'a str) -> BTreeMap<&'a str, &'a str> {
    let (mut through, mut next) = (BTreeMap::new(), VecDeque::from([from]));
    while let Some(file) = next.pop_front() {
        for &target in imports.get(file).into_iter().flatten() {
            if !through.contains_key(target) {
                through.insert(target, file);
                next.push_back(target);
            }
        }
    }
    through
}

/// Returns the path from a file back to itself.
fn cycle<'a>(through: &BTreeMap<&'a str, &'a str>, file: &'a str) -> Vec<&'a str> {
    let mut cycle = vec![file, through[file]];
    while cycle[cycle.len() - 1] != file {
        cycle.push(through[cycle[cycle.len() - 1]]);
    }
    cycle.reverse();
    cycle
}

#[test]
fn cycles_are_found_through_folders_re_exports_and_paths() {
    let found = |files: &[(&str, &str)]| {
        let sources: Vec<_> = files.iter().map(|(name, text)| (format!("src/{name}"), (*text).to_owned())).collect();
        let the_crate = Crate::new("src/", "package", &sources);
        cycles(&the_crate.imports()).iter().map(|(cycle, _)| cycle.join(" ").replace("src/", "")).collect::<Vec<_>>()
    };
    // An item that a folder re-exports belongs to the file that defines it.
    let folder = ("a/mod.rs", "mod b; mod c; pub use b::B; pub(crate) use c::{C, D as E}; const N: u8 = 0;");
    assert_eq!(found(&[folder, ("a/b.rs", "use super::C; pub struct B;"), ("a/c.rs", "struct C;")]), [""; 0]);
    let both = found(&[folder, ("a/b.rs", "use super::{C};"), ("a/c.rs", "fn f() { crate::a::B::new() }")]);
    assert_eq!(both, ["a/b.rs a/c.rs a/b.rs"]);
    assert_eq!(found(&[folder, ("a/b.rs", "use super::E as F;"), ("a/c.rs", "use crate::{a::{self, B}};")]), both);
    assert_eq!(found(&[folder, ("a/b.rs", "use crate::a; fn f(_: a::E) {}"), ("a/c.rs", "use super::b::B;")]), both);
    // A parent that uses its child, and a child that uses what its parent defines.
    let parent = ("a/mod.rs", "mod b; mod c; pub use c::*; pub use b::B; fn f(b: &B) {} pub const N: u8 = 0;");
    assert_eq!(found(&[parent, ("a/b.rs", "use super::N;")]), ["a/b.rs a/mod.rs a/b.rs"]);
    assert_eq!(found(&[parent, ("a/b.rs", "use super::C;"), ("a/c.rs", "pub fn C() {}")]), [""; 0]);
    assert_eq!(found(&[parent, ("a/b.rs", "use super::C;"), ("a/c.rs", "pub fn C() { super::B; }")]), both);
    // The roots of a library and of its binary, and the imports of tests.
    let root = ("lib.rs", "mod x; pub use x::X; pub struct Y;");
    assert_eq!(found(&[root, ("x.rs", "pub struct X;"), ("main.rs", "use package::X;")]), [""; 0]);
    assert_eq!(found(&[root, ("x.rs", "use crate::y::Y;"), ("y.rs", "use package::X;")]), ["x.rs y.rs x.rs"]);
    let main = ("main.rs", "mod x; use package::y::Y; fn main() { x::run() } const N: u8 = 0;");
    let lib = ("lib.rs", "pub mod y; pub struct N;");
    assert_eq!(found(&[main, lib, ("x.rs", "pub fn run() {}"), ("y.rs", "use crate::N;")]), [""; 0]);
    assert_eq!(found(&[main, lib, ("x.rs", "use super::N;"), ("y.rs", "use crate::N;")]), ["main.rs x.rs main.rs"]);
    assert_eq!(found(&[("x.rs", "use crate::y::Y;"), ("y.rs", "#[cfg(test)]\nmod t { use crate::x::X; }")]), [""; 0]);
    assert_eq!(found(&[("x.rs", "use crate::y::Y;"), ("y.rs", "#[cfg(test)] use z::Z;\nuse super::x::X;")]).len(), 1);
}
