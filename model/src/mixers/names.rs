//! The names of a family's tensors in other programs' files, as a set of tables.

use std::collections::BTreeMap;

use crate::weights::{Entry, Reading};

/// Pairs of our name and the name in the files.
pub(super) type Names = &'static [(&'static str, &'static str)];

/// The names of a family's tensors in files of one kind.
#[derive(Debug)]
pub(crate) struct TensorNames {
    /// Tensors outside the layers.
    pub(super) tensors: Names,
    /// The prefix of a layer's tensor names, before the layer's number: ours and theirs.
    pub(super) layer: (&'static str, &'static str),
    /// Tensors of a layer, after its number.
    pub(super) layers: Names,
    /// Tensors whose stored values differ from ours, by the end of our name.
    pub(super) readings: &'static [(&'static str, Reading)],
    /// Tensors that files may contain but that are not needed.
    pub(super) unused: &'static [&'static str],
}

impl TensorNames {
    /// Gives the tensors of a file our names. The second value lists the names of tensors that the family does not
    /// have.
    pub(crate) fn rename(&self, entries: BTreeMap<String, Entry>) -> (BTreeMap<String, Entry>, Vec<String>) {
        let (mut renamed, mut unknown) = (BTreeMap::new(), Vec::new());
        for (name, mut entry) in entries {
            match self.ours(&name) {
                Some(ours) => {
                    let reading = self.readings.iter().find(|(end, _)| ours.ends_with(end));
                    entry.reading = reading.map_or(Reading::Plain, |(_, reading)| *reading);
                    entry.shape = entry.in_file(&entry.shape);
                    renamed.insert(ours, entry);
                }
                None if self.unused.contains(&&*name) => {}
                None => unknown.push(name),
            }
        }
        (renamed, unknown)
    }

    /// Whether files store the matrix with this name of ours transposed.
    pub(crate) fn is_transposed(&self, ours: &str) -> bool {
        self.readings.iter().any(|(end, reading)| ours.ends_with(end) && *reading == Reading::Transposed)
    }

    /// Our name of a tensor. No two names map to the same one, because the tables are one to one.
    pub(crate) fn ours(&self, theirs: &str) -> Option<String> {
        if self.unused.contains(&theirs) {
            return None;
        }
        if let Some((ours, _)) = self.tensors.iter().find(|(_, name)| *name == theirs) {
            return Some((*ours).into());
        }
        let (layer, name) = theirs.strip_prefix(self.layer.1)?.split_once('.')?;
        let (ours, _) = self.layers.iter().find(|(_, known)| *known == name)?;
        Some(format!("{}{layer}.{ours}", self.layer.0))
    }

    /// The name in files of a tensor of ours.
    pub(crate) fn theirs(&self, ours: &str) -> String {
        let known = self.tensors.iter().find(|(name, _)| *name == ours).map(|(_, theirs)| (*theirs).into());
        let of_layer = || {
            let (layer, name) = ours.strip_prefix(self.layer.0)?.split_once('.')?;
            let (_, theirs) = self.layers.iter().find(|(known, _)| *known == name)?;
            Some(format!("{}{layer}.{theirs}", self.layer.1))
        };
        known.or_else(of_layer).unwrap_or_else(|| ours.into())
    }
}
