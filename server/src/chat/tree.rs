//! Draws the versions of a conversation and its branches.

use std::collections::HashMap;
use std::fmt::Write;

use super::family::{Family, Version, short};

/// Draws the tree of a family: one version per line, below its parent. Lines are indented where a version has several
/// continuations. `head` is the current version.
pub(super) fn draw(family: &Family, head: &str) -> String {
    let places: HashMap<&str, usize> =
        family.versions.iter().enumerate().map(|(at, version)| (version.id.as_str(), at)).collect();
    let mut children = vec![Vec::new(); family.versions.len()];
    let mut roots = Vec::new();
    for (at, version) in family.versions.iter().enumerate() {
        match version.parent.as_deref().and_then(|parent| places.get(parent)) {
            Some(parent) => children[*parent].push(at),
            None => roots.push(at),
        }
    }
    let mut heads: HashMap<&str, Vec<&str>> = HashMap::new();
    for branch in &family.branches {
        heads.entry(&branch.head).or_default().push(branch.title());
    }
    let mut tree = String::new();
    // Each item: a version, the prefix of its line, and the prefix of its descendants' lines. The loop does not
    // recurse, because a conversation may be long.
    let mut open: Vec<(usize, String, String)> =
        roots.into_iter().rev().map(|root| (root, String::new(), String::new())).collect();
    while let Some((at, before, below)) = open.pop() {
        let version = &family.versions[at];
        let mark = if version.id == head { '*' } else { 'o' };
        let heads = heads.get(version.id.as_str()).map_or(&[][..], Vec::as_slice);
        tree.push_str(&before);
        // Writing to a string cannot fail.
        let _ = writeln!(tree, "{mark} {}", described(version, heads));
        if let [only] = children[at][..] {
            open.push((only, below.clone(), below));
            continue;
        }
        for (place, child) in children[at].iter().enumerate().rev() {
            let (corner, side) = if place + 1 == children[at].len() { ("└─", "  ") } else { ("├─", "│ ") };
            open.push((*child, format!("{below}{corner}"), format!("{below}{side}")));
        }
    }
    tree
}

/// Describes a version, and the branches whose head it is, in words.
fn described(version: &Version, branches: &[&str]) -> String {
    let Version { id, tokens, label, tags, kept, text, .. } = version;
    let mut words = vec![short(id).to_owned(), format!("{tokens} tokens")];
    if !text.is_empty() {
        words.push(format!("\"{text}\""));
    }
    words.extend(label.clone());
    words.extend(tags.iter().map(|tag| format!("#{tag}")));
    if !kept {
        words.push("(no longer kept)".to_owned());
    }
    if !branches.is_empty() {
        words.push(format!("[{}]", branches.join(", ")));
    }
    words.join("  ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::family::Branch;

    fn version(id: &str, parent: &str, text: &str) -> Version {
        let parent = Some(parent.to_owned()).filter(|parent| !parent.is_empty());
        Version { id: id.into(), parent, text: text.into(), tokens: 7, kept: true, ..Version::default() }
    }

    #[test]
    fn branches_part_where_a_version_has_several_continuations() {
        let branch = |id: &str, name: Option<&str>, head: &str| Branch {
            id: id.into(),
            name: name.map(Into::into),
            head: head.into(),
        };
        let mut versions = vec![
            version("ver_a", "", ""),
            version("ver_b", "ver_a", "a fox"),
            version("ver_c", "ver_b", "day"),
            version("ver_d", "ver_c", "noon"),
            version("ver_e", "ver_b", "night"),
            version("ver_f", "ver_d", "tea"),
            version("ver_g", "ver_d", "rain"),
        ];
        (versions[4].label, versions[4].kept) = (Some("dark".into()), false);
        versions[4].tags = vec!["best".into()];
        let branches =
            vec![branch("ses_1", None, "ver_g"), branch("ses_2", Some("owl"), "ver_e"), branch("ses_3", None, "ver_e")];
        let tree = draw(&Family { branches, versions }, "ver_e");
        let expected = "\
o ver_a  7 tokens
o ver_b  7 tokens  \"a fox\"
├─o ver_c  7 tokens  \"day\"
│ o ver_d  7 tokens  \"noon\"
│ ├─o ver_f  7 tokens  \"tea\"
│ └─o ver_g  7 tokens  \"rain\"  [ses_1]
└─* ver_e  7 tokens  \"night\"  dark  #best  (no longer kept)  [owl, ses_3]
";
        assert_eq!(tree, expected);
    }
}
