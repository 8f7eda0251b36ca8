//! Parses the lines that the user types.

/// The list of commands.
pub(super) const HELP: &str = "\
/more             continue an answer that was cut off
/fork [NAME]      branch off here, and go on in the branch
/tree             draw the versions and branches; * is the current version
/rewind [WHERE]   go back one turn, or to WHERE: a number of turns, a version or a tag
/switch SESSION   go on in another branch, by its name or id
/save FILE        write the conversation to a new file
/load FILE        go on with the conversation in a file
/help             show this list
/exit             end, as Ctrl-D does
//TEXT            send a message that begins with /
";

/// A parsed line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Line<'a> {
    /// An empty line.
    Empty,
    /// A message to the model.
    Message(&'a str),
    More,
    /// Forks the conversation; the argument is the new branch's name.
    Fork(Option<&'a str>),
    Tree,
    /// Rewinds to a version; without an argument, by one turn.
    Rewind(Option<&'a str>),
    Switch(&'a str),
    Save(&'a str),
    Load(&'a str),
    Help,
    Exit,
}

/// Parses a line, or says what is wrong with it.
pub(super) fn parse(line: &str) -> Result<Line<'_>, String> {
    if line.trim().is_empty() {
        return Ok(Line::Empty);
    }
    let Some(rest) = line.strip_prefix('/') else { return Ok(Line::Message(line)) };
    if rest.starts_with('/') {
        return Ok(Line::Message(rest));
    }
    let (name, given) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    let given = Some(given.trim()).filter(|given| !given.is_empty());
    let needs = |what: &str| given.ok_or_else(|| format!("/{name} needs {what}: /{name} {what}"));
    let line = match name {
        "fork" => Line::Fork(given),
        "rewind" => Line::Rewind(given),
        "switch" => Line::Switch(needs("SESSION")?),
        "save" => Line::Save(needs("FILE")?),
        "load" => Line::Load(needs("FILE")?),
        "more" | "tree" | "help" | "exit" => {
            if let Some(given) = given {
                return Err(format!("/{name} takes nothing after it, found `{given}`"));
            }
            match name {
                "more" => Line::More,
                "tree" => Line::Tree,
                "help" => Line::Help,
                _ => Line::Exit,
            }
        }
        _ => return Err(format!("there is no command /{name}; /help lists them")),
    };
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_a_message_or_a_command() {
        for (text, line) in [
            ("", Line::Empty),
            ("  ", Line::Empty),
            (" a fox", Line::Message(" a fox")),
            ("1/2", Line::Message("1/2")),
            ("//etc", Line::Message("/etc")),
            ("/fork", Line::Fork(None)),
            ("/fork the  night ", Line::Fork(Some("the  night"))),
            ("/rewind 2", Line::Rewind(Some("2"))),
            ("/save a file", Line::Save("a file")),
            ("/exit ", Line::Exit),
        ] {
            assert_eq!(parse(text), Ok(line), "{text}");
        }
        for (text, words) in [
            ("/save", "/save needs FILE"),
            ("/switch  ", "needs SESSION"),
            ("/tree all", "takes nothing after it, found `all`"),
            ("/forks", "there is no command /forks"),
            ("/", "there is no command /;"),
        ] {
            assert!(parse(text).unwrap_err().contains(words), "{text}");
        }
    }

    #[test]
    fn the_help_lists_every_command() {
        for name in ["more", "fork", "tree", "rewind", "switch", "save", "load", "help", "exit"] {
            assert!(HELP.contains(&format!("/{name} ")), "{name}");
            assert!(!matches!(parse(&format!("/{name} x")), Err(error) if error.contains("there is no")), "{name}");
        }
    }
}
