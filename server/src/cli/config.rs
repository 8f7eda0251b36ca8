//! The `--config` file: any flag of `serve`, under its own name, as TOML.
//!
//! The entries of the file become command-line flags, placed before the given ones. A flag or variable that is given
//! overrides the file.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use clap::{Arg, ArgAction, Command};
use tidegate_server::nearest::nearest;
use toml::{Table, Value};

/// The flag that names the file, and its environment variable.
const FLAG: &str = "config";
const VARIABLE: &str = "TIDEGATE_CONFIG";

/// Why a file of flags cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ConfigError {
    #[error("{0}: {1}")]
    Read(PathBuf, String),
    #[error("{path}: there is no flag {key}{}", suggestion(.nearest.as_deref()))]
    Unknown { path: PathBuf, key: String, nearest: Option<String> },
    #[error("{path}: {key} must be {expected}")]
    Type { path: PathBuf, key: String, expected: &'static str },
}

fn suggestion(nearest: Option<&str>) -> String {
    nearest.map_or_else(String::new, |name| format!("; the nearest is {name}"))
}

/// Adds the flags of the file to `args`, the arguments of `serve`. The arguments or the variable name the file. Returns
/// the new arguments, and the path of the file.
pub(super) fn with_file(
    args: Vec<OsString>,
    serve: &Command,
    variable: impl Fn(&str) -> Option<OsString>,
) -> Result<(Vec<OsString>, Option<PathBuf>), ConfigError> {
    let named = value_of(&args, FLAG).or_else(|| variable(VARIABLE)).filter(|path| !path.is_empty());
    let Some(path) = named.map(PathBuf::from) else { return Ok((args, None)) };
    let text = std::fs::read_to_string(&path).map_err(|error| ConfigError::Read(path.clone(), error.to_string()))?;
    let table: Table = text
        .parse()
        .map_err(|error: toml::de::Error| ConfigError::Read(path.clone(), error.to_string().trim_end().to_owned()))?;
    let mut more = Vec::new();
    for (key, value) in table {
        let arg = flag(serve, &key).ok_or_else(|| unknown(serve, &path, &key))?;
        let set = arg.get_env().and_then(OsStr::to_str).and_then(&variable).is_some();
        let values = texts(value, arg, &path, &key)?;
        if !set && value_of(&args, &key).is_none() {
            more.extend(values.into_iter().map(|value| OsString::from(format!("--{key}={value}"))));
        }
    }
    let mut args = args;
    drop(args.splice(2..2, more));
    Ok((args, Some(path)))
}

/// Returns the value of a flag in `args`, if the flag is present; an empty one if the value is missing. As on the
/// command line itself, a following flag is not a value.
fn value_of(args: &[OsString], flag: &str) -> Option<OsString> {
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let Some(rest) = arg.to_str().and_then(|arg| arg.strip_prefix("--")).and_then(|arg| arg.strip_prefix(flag))
        else {
            continue;
        };
        match rest.strip_prefix('=') {
            Some(value) => return Some(value.into()),
            None if rest.is_empty() => {
                let value = args.next().filter(|value| !value.to_string_lossy().starts_with("--"));
                return Some(value.cloned().unwrap_or_default());
            }
            None => {}
        }
    }
    None
}

/// Returns the flag with this name, if a file may set it.
fn flag<'a>(serve: &'a Command, key: &str) -> Option<&'a Arg> {
    flags(serve).find(|arg| arg.get_long() == Some(key))
}

fn flags(serve: &Command) -> impl Iterator<Item = &Arg> {
    serve.get_arguments().filter(|arg| !["help", FLAG].contains(&arg.get_id().as_str()))
}

fn unknown(serve: &Command, path: &Path, key: &str) -> ConfigError {
    let nearest = nearest(&key.replace('_', "-"), flags(serve).filter_map(Arg::get_long)).map(str::to_owned);
    let key: String = key.chars().take(100).collect();
    ConfigError::Unknown { path: path.into(), key, nearest }
}

/// Returns the values of a flag, as they would be written on the command line.
fn texts(value: Value, arg: &Arg, path: &Path, key: &str) -> Result<Vec<String>, ConfigError> {
    let wrong = |expected| Err(ConfigError::Type { path: path.into(), key: key.into(), expected });
    let several = matches!(arg.get_action(), ArgAction::Append);
    let one = |value| match value {
        Value::String(text) => Some(text),
        Value::Integer(number) => Some(number.to_string()),
        _ => None,
    };
    match value {
        Value::Array(items) if several => match items.into_iter().map(one).collect() {
            Some(texts) => Ok(texts),
            None => wrong("an array of strings"),
        },
        value => match one(value) {
            Some(text) => Ok(vec![text]),
            None if several => wrong("a string or an array of strings"),
            None => wrong("a string or a whole number"),
        },
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::cli::{Cli, with_command};

    /// Returns the command line after the program name, with this file and these variables.
    fn line(file: &str, args: &[&str], variables: &[&str]) -> Result<Vec<String>, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tidegate.toml");
        std::fs::write(&path, file).unwrap();
        let args =
            ["tidegate"].iter().chain(args).map(|arg| OsString::from(arg.replace("FILE", path.to_str().unwrap())));
        let serve = Cli::command().find_subcommand("serve").unwrap().clone();
        let variable = |name: &str| variables.contains(&name).then(|| OsString::from("7"));
        match with_file(with_command(args), &serve, variable) {
            Ok((args, _)) => Ok(args[2..].iter().map(|arg| arg.to_string_lossy().into_owned()).collect()),
            Err(error) => Err(error.to_string().replace(path.to_str().unwrap(), "FILE")),
        }
    }

    #[test]
    fn a_file_gives_flags_that_the_command_line_and_variables_replace() {
        let file = "port = 9000\nram-budget = \"2G\"\ncors-origin = [\"https://a.b\", \"https://c.d\"]\nslots = 8\nqueue = 3\n";
        let mut found = line(file, &["--config", "FILE", "--port", "1", "--queue=9"], &["TIDEGATE_SLOTS"]).unwrap();
        found.retain(|arg| arg.contains('=') || arg == "1");
        found.sort();
        let expected = ["--cors-origin=https://a.b", "--cors-origin=https://c.d", "--queue=9", "--ram-budget=2G", "1"];
        assert_eq!(found, expected);
        assert_eq!(line("port = 1", &["--port", "2"], &[]).unwrap(), ["--port", "2"], "no file is named");
    }

    #[test]
    fn the_next_flag_is_no_file() {
        let args = ["--config", "--port", "1"];
        assert_eq!(line("port = 2", &args, &[]).unwrap(), args, "the command line says what is missing");
        let found = line("queue = 3", &["--port", "--config=FILE"], &[]).unwrap();
        assert_eq!(found[0], "--queue=3");
    }

    #[test]
    fn every_flag_of_serve_may_be_in_a_file() {
        let command = Cli::command();
        let serve = command.find_subcommand("serve").unwrap();
        for arg in flags(serve) {
            let name = arg.get_long().unwrap();
            let found = line(&format!("{name} = \"1\""), &["--config=FILE"], &[]).unwrap();
            assert_eq!(found[0], format!("--{name}=1"));
        }
    }

    #[test]
    fn what_is_wrong_in_a_file_is_named() {
        for (file, expected) in [
            ("ports = 1", "FILE: there is no flag ports; the nearest is port"),
            ("max_body_bytes = 1", "FILE: there is no flag max_body_bytes; the nearest is max-body-bytes"),
            ("completely-different-name = 1", "FILE: there is no flag completely-different-name"),
            ("config = \"x\"", "FILE: there is no flag config"),
            ("port = [1]", "FILE: port must be a string or a whole number"),
            ("port = true", "FILE: port must be a string or a whole number"),
            ("cors-origin = [[1]]", "FILE: cors-origin must be an array of strings"),
            ("[serve]\nport = 1", "FILE: there is no flag serve"),
        ] {
            let error = line(file, &["serve", "--config", "FILE"], &[]).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
        assert!(
            line("port = ", &["--config", "FILE"], &[]).unwrap_err().starts_with("FILE: TOML parse error at line 1")
        );
        assert!(line("", &["--config", "/nowhere.toml"], &[]).unwrap_err().starts_with("/nowhere.toml: No such file"));
    }
}
