//! A GGUF file as llama.cpp writes it, which is a whole model: its metadata takes the place of `config.json`, and its
//! tensors have llama.cpp's names, which error messages use too.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::gguf;
use crate::config::{ConfigError, DecoderConfig};
use crate::schema::{self, GGUF_FAMILIES, GgufFamily, TensorNames};
use crate::weights::{Bytes, Entry, Errors, File, LoadError, Metadata, Parts};

/// The values of `general.architecture` that [`super::load`] supports.
pub fn gguf_architectures() -> impl Iterator<Item = &'static str> {
    GGUF_FAMILIES.iter().map(|family| family.architecture)
}

/// Reads a file's metadata and its tensors, under the names in the file.
pub(super) fn parse(name: String, bytes: Bytes) -> Result<(File, Metadata), LoadError> {
    let header = gguf::header((*bytes).as_ref());
    let header = header.map_err(|reason| LoadError::Format { file: name.clone(), reason })?;
    let metadata = Metadata::new(Arc::clone(&bytes), header.metadata);
    let (parts, entries) = (Parts::new(vec![bytes]), header.entries);
    Ok((File { name, config: "its metadata", parts, entries, errors: Errors::default() }, metadata))
}

/// The model that the metadata describes.
pub(super) struct Described {
    pub(super) config: DecoderConfig,
    pub(super) names: &'static TensorNames,
    /// Tensors that the family does not have.
    pub(super) unknown: Vec<String>,
}

/// Reads the config from the metadata, and gives the tensors our names and shapes.
pub(super) fn describe(file: &mut File, metadata: &Metadata) -> Result<Described, LoadError> {
    let described = config(metadata, &file.entries);
    let (family, config) = described.map_err(|reason| LoadError::Format { file: file.name.clone(), reason })?;
    let unknown = renamed(file, &family.names, &config);
    Ok(Described { config, names: &family.names, unknown })
}

/// Gives a file's tensors our names and shapes. Returns the tensors that the family does not have.
pub(super) fn renamed(file: &mut File, names: &TensorNames, config: &DecoderConfig) -> Vec<String> {
    let (entries, unknown) = names.rename(std::mem::take(&mut file.entries));
    file.entries = entries;
    schema::unpack(config, &mut file.entries);
    for (name, tensor) in schema::tensors(config).all {
        let Some(entry) = file.entries.get_mut(&name).filter(|_| !tensor.packed) else { continue };
        if is_same(&entry.shape, &tensor.shape) {
            entry.shape = tensor.shape;
        }
    }
    unknown
}

/// Returns whether two shapes can hold the same tensor: published files include or omit dimensions of size 1, and store
/// vectors whole or as rows of heads or groups.
fn is_same(theirs: &[usize], ours: &[usize]) -> bool {
    let is_vector = |shape: &[usize]| product(shape) == shape.iter().max().copied();
    let longer = |shape: &[usize]| shape.iter().copied().filter(|&side| side != 1).collect::<Vec<_>>();
    let numbers = product(theirs);
    let as_many = numbers.is_some() && numbers == product(ours);
    as_many && (is_vector(theirs) || is_vector(ours) || longer(theirs) == longer(ours))
}

fn product(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |n, &side| n.checked_mul(side))
}

/// Returns the family and the config, or why the metadata describes none.
fn config(
    metadata: &Metadata,
    entries: &BTreeMap<String, Entry>,
) -> Result<(&'static GgufFamily, DecoderConfig), String> {
    let architecture = metadata.architecture().map_err(|error| error.to_string())?;
    let family = GGUF_FAMILIES.iter().find(|family| family.architecture == architecture).ok_or_else(|| {
        let supported: Vec<_> = gguf_architectures().collect();
        let shown: String = architecture.chars().take(64).collect();
        format!("general.architecture must be {}, found {shown:?}", supported.join(" or "))
    })?;
    let parts = metadata.number("split.count").map_err(|error| error.to_string())?;
    if let Some(parts) = parts.filter(|&parts| parts > 1) {
        return Err(format!("split.count must be 1, found {parts}: join the parts with llama-gguf-split --merge"));
    }
    let config = family.config(metadata, entries).map_err(|error| error.to_string())?;
    match DecoderConfig::from_json(&config) {
        Ok(config) => Ok((family, config)),
        Err(ConfigError::Bound { field, bound, found }) => {
            Err(format!("{} must be {bound}, found {found}", family.key(field)))
        }
        Err(error) => Err(error.to_string()),
    }
}
