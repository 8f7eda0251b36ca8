//! What others call the tensors of a family: a set of tables.

use std::collections::BTreeMap;

use crate::weights::{Entry, Reading};

/// Names of ours, each with that in the files.
pub(super) type Names = &'static [(&'static str, &'static str)];

/// The names of a family's tensors in files of one kind.
#[derive(Debug)]
pub(crate) struct TensorNames {
    /// Tensors outside the layers.
    pub(super) tensors: Names,
    /// What our names of a layer's tensors begin with, before its number, and what theirs do.
    pub(super) layer: (&'static str, &'static str),
    /// Tensors of a layer, below its number.
    pub(super) layers: Names,
    /// Tensors whose numbers differ from ours, by the end of our names.
    pub(super) readings: &'static [(&'static str, Reading)],
    /// Tensors that files may have without need.
    pub(super) unused: &'static [&'static str],
}

impl TensorNames {
    /// Gives the tensors of a file our names; the second part are the names of those that the family does not have.
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

    /// Whether files have the matrix of this name of ours with rows for columns.
    pub(crate) fn is_transposed(&self, ours: &str) -> bool {
        self.readings.iter().any(|(end, reading)| ours.ends_with(end) && *reading == Reading::Transposed)
    }

    /// Our name of a tensor. No two names become one, because the tables are one to one.
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

    /// The name of a tensor in files.
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
