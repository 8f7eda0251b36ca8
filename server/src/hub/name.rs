//! The name of a model on a hub, as users type it, and validation of all texts from a hub that become parts of paths.

use std::fmt::{self, Display};
use std::io::ErrorKind;
use std::path::Path;
use std::str::FromStr;

/// Maximum length of a model's name in bytes.
const MOST_NAME: usize = 96;
/// Maximum length of a revision or of a file's path in bytes.
const MOST_PATH: usize = 512;
/// Maximum length of one path component in bytes, as in file systems.
const MOST_PART: usize = 255;

/// The default revision.
const MAIN: &str = "main";

/// The parsed form of `ORG/NAME[@REVISION][:FILE]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HubName {
    /// `ORG/NAME`.
    pub(super) repo: String,
    /// The branch, tag or commit, if one is named.
    pub(super) revision: Option<String>,
    /// The file in the model's repository, if one is named.
    pub(super) file: Option<String>,
}

impl HubName {
    /// Parses a path that does not exist but is written like a name on a hub.
    ///
    /// A path into an existing folder is a path: a typing error in it is not sent to anybody.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        let name: Self = path.to_str()?.parse().ok()?;
        let folder = Path::new(name.repo.split('/').next()?);
        // A dangling link and an unreadable folder exist.
        let is_missing = |path: &Path| path.symlink_metadata().is_err_and(|error| error.kind() == ErrorKind::NotFound);
        (is_missing(path) && is_missing(folder)).then_some(name)
    }

    /// Returns `ORG/NAME`, the model's name in the API.
    pub(crate) fn model(&self) -> &str {
        &self.repo
    }

    /// Returns the revision, or the default one.
    pub(super) fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or(MAIN)
    }

    /// Returns the commit, if the revision is one. A commit never changes.
    pub(super) fn commit(&self) -> Option<Commit> {
        Commit::new(self.revision()).ok()
    }
}

impl FromStr for HubName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (rest, file) = match text.split_once(':') {
            Some((rest, file)) => (rest, Some(file)),
            None => (text, None),
        };
        let (repo, revision) = match rest.split_once('@') {
            Some((repo, revision)) => (repo, Some(revision)),
            None => (rest, None),
        };
        let wrong = |what: &str| Err(format!("must be ORG/NAME[@REVISION][:FILE], found {what}"));
        if !is_repo(repo) {
            return wrong(&format!("the name {:?}", shown(repo)));
        }
        if let Some(revision) = revision.filter(|revision| !is_revision(revision)) {
            return wrong(&format!("the revision {:?}", shown(revision)));
        }
        if let Some(file) = file.filter(|file| !is_file(file)) {
            return wrong(&format!("the file {:?}", shown(file)));
        }
        Ok(Self { repo: repo.into(), revision: revision.map(Into::into), file: file.map(Into::into) })
    }
}

impl Display for HubName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.repo)?;
        if let Some(revision) = &self.revision {
            write!(formatter, "@{revision}")?;
        }
        if let Some(file) = &self.file {
            write!(formatter, ":{file}")?;
        }
        Ok(())
    }
}

/// Returns whether a text is `ORG/NAME` by the rules of the hub. It must not contain `--`, which stands for the slash
/// in the names of the cache's folders.
pub(super) fn is_repo(text: &str) -> bool {
    let part = |part: &str| {
        let known = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let end = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        part.bytes().all(known) && part.bytes().next().is_some_and(end) && part.bytes().next_back().is_some_and(end)
    };
    text.len() <= MOST_NAME
        && !text.contains("--")
        && !text.contains("..")
        && text.strip_suffix(".git").is_none()
        && text.split_once('/').is_some_and(|(organization, name)| part(organization) && part(name))
}

/// Returns whether a text can be the name of a branch or tag, or a commit.
fn is_revision(text: &str) -> bool {
    is_file(text) && !text.contains("..") && !text.contains(['~', '^', ':', '?', '*', '[', ' ', '@'])
}

/// Returns whether a text can be the path of a file within a folder, without leading out of it.
pub(super) fn is_file(text: &str) -> bool {
    let part = |part: &str| !["", ".", ".."].contains(&part) && part.len() <= MOST_PART;
    text.len() <= MOST_PATH && text.split('/').all(part) && !text.contains(|c: char| c == '\\' || c.is_control())
}

/// Prepares a text from elsewhere for an error message.
pub(super) fn shown(text: &str) -> String {
    text.chars().take(80).collect::<String>().escape_debug().to_string()
}

/// A commit id: 40 hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Commit(String);

impl Commit {
    pub(super) fn new(text: &str) -> Result<Self, String> {
        let name = || format!("a commit must be 40 hexadecimal digits, found {:?}", shown(text));
        is_hex(text, 40).then(|| Self(text.into())).ok_or_else(name)
    }

    pub(super) fn text(&self) -> &str {
        &self.0
    }
}

/// The digest that names a file's contents: SHA-256 for a large file, or git's blob id, a SHA-1, for a small one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum BlobId {
    Git(String),
    Sha256(String),
}

impl BlobId {
    pub(super) fn git(text: &str) -> Result<Self, String> {
        let name = || format!("the name of a file's contents must be 40 hexadecimal digits, found {:?}", shown(text));
        is_hex(text, 40).then(|| Self::Git(text.into())).ok_or_else(name)
    }

    pub(super) fn sha256(text: &str) -> Result<Self, String> {
        let name = || format!("a SHA-256 must be 64 hexadecimal digits, found {:?}", shown(text));
        is_hex(text, 64).then(|| Self::Sha256(text.into())).ok_or_else(name)
    }

    pub(super) fn text(&self) -> &str {
        match self {
            Self::Git(text) | Self::Sha256(text) => text,
        }
    }
}

fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_a_revision_and_a_file() {
        let commit = "0123456789abcdef0123456789abcdef01234567";
        for (text, repo, revision, file) in [
            ("org/name", "org/name", None, None),
            ("a-b.c/RWKV7_x-1.5B@v1.0", "a-b.c/RWKV7_x-1.5B", Some("v1.0"), None),
            ("org/name:a/b-Q8_0.gguf", "org/name", None, Some("a/b-Q8_0.gguf")),
            ("org/name@refs/pr/1:x.gguf", "org/name", Some("refs/pr/1"), Some("x.gguf")),
            (&format!("o/n@{commit}"), "o/n", Some(commit), None),
        ] {
            let name: HubName = text.parse().unwrap();
            assert_eq!((name.repo.as_str(), name.revision.as_deref(), name.file.as_deref()), (repo, revision, file));
            assert_eq!(name.to_string(), text);
            assert_eq!(name.commit().is_some(), revision == Some(commit));
        }
    }

    #[test]
    fn a_name_that_could_be_another_path_is_refused() {
        let long = format!("o/{}", "n".repeat(100));
        for text in [
            "",
            "name",
            "a/b/c",
            "/a/b",
            "./a",
            "../a",
            "a/..",
            "a/b--c",
            "a--b/c",
            "-a/b",
            "a/b-",
            "a/b.git",
            "a/b.",
            "a b/c",
            "a/é",
            &long,
            "a/b@",
            "a/b@../x",
            "a/b@x..y",
            "a/b@/x",
            "a/b@x//y",
            "a/b@x y",
            "a/b:",
            "a/b:../x",
            "a/b:/x",
            "a/b:x/../y",
            "a/b:x\\y",
            "a/b:x\ny",
            "a/b:./x",
            "a/b@x:",
        ] {
            let error = text.parse::<HubName>().expect_err(text);
            assert!(error.starts_with("must be ORG/NAME[@REVISION][:FILE], found") && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn a_path_is_no_name_on_a_hub_if_it_or_its_folder_exists() {
        for path in ["src/nothing", "src/hub", "nowhere", "/nowhere/x", "./nowhere/x", "a/b/c"] {
            assert_eq!(HubName::of(Path::new(path)), None, "{path}");
        }
        assert_eq!(HubName::of(Path::new("nobody/nothing")).unwrap().model(), "nobody/nothing");
        let folder = tempfile::tempdir_in(".").unwrap();
        let link = Path::new(folder.path().file_name().unwrap()).join("x");
        std::os::unix::fs::symlink("nothing", &link).unwrap();
        assert_eq!(HubName::of(&link), None, "a link to nothing");
    }

    #[test]
    fn commits_and_contents_have_hexadecimal_names() {
        let (forty, sixty_four) = ("a".repeat(40), "0".repeat(64));
        assert!(Commit::new(&forty).is_ok() && BlobId::git(&forty).is_ok() && BlobId::sha256(&sixty_four).is_ok());
        for wrong in
            ["", "main", "../../../../etc/passwd", &"A".repeat(40), &"g".repeat(40), &"a".repeat(39), &sixty_four]
        {
            assert!(Commit::new(wrong).is_err() && BlobId::git(wrong).is_err(), "{wrong}");
        }
        assert!(BlobId::sha256(&forty).is_err() && BlobId::sha256(&"/".repeat(64)).is_err());
    }
}
