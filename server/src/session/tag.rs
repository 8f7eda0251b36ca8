//! Tags, and how clients refer to versions: by id, or by a tag of a session.

use std::fmt;

use super::id::VersionId;

/// Maximum number of characters in a tag's name.
const MAX_NAME: usize = 64;

/// A client's name for a version, unique within one session: 1 to 64 of `A-Z`, `a-z`, `0-9`, `.`, `_` and `-`. It does
/// not begin with `.`, because `.` and `..` have a meaning in URL paths, nor with `ver_`, like the ids of versions.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TagName(String);

impl TagName {
    /// Parses a name; `None` unless the text has the right form.
    pub fn parse(text: &str) -> Option<Self> {
        let allowed = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'.' | b'_' | b'-');
        let right = (1..=MAX_NAME).contains(&text.len()) && text.bytes().all(allowed);
        (right && !text.starts_with('.') && !text.starts_with("ver_")).then(|| Self(text.to_owned()))
    }

    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TagName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A reference to a version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VersionRef {
    /// The version's id.
    Id(VersionId),
    /// A tag of the session that the request is about.
    Tag(TagName),
}

impl VersionRef {
    /// Parses the id of a version or the name of a tag; `None` if the text is neither.
    pub fn parse(text: &str) -> Option<Self> {
        VersionId::parse(text).map(Self::Id).or_else(|| TagName::parse(text).map(Self::Tag))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_of_tags_are_short_and_unlike_ids() {
        for right in ["a", "best", "v1.2-rc_3", "-", "_", "9", "Ver_1", &"x".repeat(64)] {
            assert_eq!(TagName::parse(right).expect(right).as_str(), right);
        }
        let id = VersionId::new();
        for wrong in ["", ".", "..", ".hidden", "a b", "a/b", "é", "a\n", "ver_1", id.as_str(), &"x".repeat(65)] {
            assert_eq!(TagName::parse(wrong), None, "{wrong}");
        }
        assert_eq!(VersionRef::parse(id.as_str()), Some(VersionRef::Id(id.clone())));
        assert_eq!(VersionRef::parse("best"), TagName::parse("best").map(VersionRef::Tag));
        assert_eq!(VersionRef::parse(&id.as_str()[..35]), None, "an id that was cut off is no tag");
    }
}
