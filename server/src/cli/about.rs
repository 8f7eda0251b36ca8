//! What the command line prints about itself: shell completions and man pages.

use std::io::{ErrorKind, Write};

use anyhow::{Context, Result};
use clap::Command;
use clap_complete::Shell;

/// Prints the program's completions for a shell.
pub(crate) fn print_completions(program: Command, shell: Shell) -> Result<()> {
    print(&completions(program, shell))
}

/// Prints the man page of a command, or of the program itself.
pub(crate) fn print_man_page(program: Command, name: Option<&str>) -> Result<()> {
    print(&man_page(program, name)?)
}

fn completions(mut program: Command, shell: Shell) -> Vec<u8> {
    let mut out = Vec::new();
    clap_complete::generate(shell, &mut program, "tidegate", &mut out);
    out
}

fn man_page(mut program: Command, name: Option<&str>) -> Result<Vec<u8>> {
    // This gives the commands their full names.
    program.build();
    let command = match name {
        None => &program,
        Some(name) => program.find_subcommand(name).with_context(|| format!("there is no command {name}"))?,
    };
    let mut out = Vec::new();
    clap_mangen::Man::new(command.clone()).render(&mut out)?;
    Ok(out)
}

fn print(text: &[u8]) -> Result<()> {
    match std::io::stdout().lock().write_all(text) {
        // The reader closed the pipe on purpose, as `head` does.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => Ok(written?),
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;
    use crate::cli::Cli;

    #[test]
    fn every_shell_completes_commands_and_flags() {
        for shell in Shell::value_variants() {
            let text = String::from_utf8(completions(Cli::definition(), *shell)).unwrap();
            for word in ["generate", "max-body-bytes", "temperature"] {
                assert!(text.contains(word), "{shell}: {word}");
            }
            assert!(!text.contains("TIDEGATE_API_KEY="), "{shell}");
        }
    }

    #[test]
    fn each_command_has_a_man_page() {
        let page = |name| String::from_utf8(man_page(Cli::definition(), name).unwrap()).unwrap();
        assert!(page(None).contains("tidegate\\-serve"), "{}", page(None));
        assert!(page(Some("serve")).contains("max\\-body\\-bytes"), "{}", page(Some("serve")));
        assert_eq!(man_page(Cli::definition(), Some("sing")).unwrap_err().to_string(), "there is no command sing");
    }
}
