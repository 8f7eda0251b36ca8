//! Weights that are split into several files, as the Hugging Face hub stores large models.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Deserialize;

use crate::weights::LoadError;

/// The name of the file that lists the shards.
pub const INDEX: &str = "model.safetensors.index.json";

/// The part of the index that is read.
#[derive(Deserialize)]
struct Index {
    /// The file of each tensor.
    weight_map: BTreeMap<String, String>,
}

/// Returns the names of the files that an index lists, sorted. They are in the index's folder.
///
/// # Errors
/// [`LoadError`] when the index cannot be read or is wrong, names no files, or names files outside its folder.
pub fn shards(index: &Path) -> Result<Vec<String>, LoadError> {
    let text = std::fs::read_to_string(index).map_err(|source| LoadError::Io { path: index.into(), source })?;
    let broken = |reason: String| LoadError::Format { file: INDEX.into(), reason };
    let Index { weight_map } = serde_json::from_str(&text).map_err(|error| broken(error.to_string()))?;
    let files: BTreeSet<String> = weight_map.into_values().collect();
    let plain = |file: &str| Path::new(file).file_name().is_some_and(|name| name == file);
    if let Some(file) = files.iter().find(|file| !plain(file)) {
        return Err(broken(format!("weight_map must name files of its folder, found {file:?}")));
    }
    if files.is_empty() {
        return Err(broken("weight_map must name a file".into()));
    }
    Ok(files.into_iter().collect())
}
