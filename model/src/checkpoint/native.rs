//! RWKV-7 as its author publishes it: one file of tensors without a config, as `.pth` or safetensors. Error messages
//! use the names in the file.

use super::pth;
use super::whole::{Described, renamed};
use crate::config::{ConfigError, DecoderConfig};
use crate::schema::native::{self, NAMES};
use crate::weights::{Bytes, Errors, File, LoadError, Parts};

/// Reads the tensors of a `.pth` file, under the names in the file.
pub(super) fn parse(name: String, bytes: Bytes) -> Result<File, LoadError> {
    let entries = pth::entries((*bytes).as_ref());
    let entries = entries.map_err(|reason| LoadError::Format { file: name.clone(), reason })?;
    Ok(File { name, config: "RWKV-7", parts: Parts::new(vec![bytes]), entries, errors: Errors::default() })
}

/// Derives the config from the tensor shapes, and gives the tensors our names and shapes.
pub(super) fn describe(file: &mut File) -> Result<Described, LoadError> {
    let config = native::config(&file.entries).map_err(|problems| file.refuse(problems))?;
    let config = DecoderConfig::from_json(&config);
    let config = config.map_err(|error| match error {
        // There is no `config.json` to blame in the message.
        ConfigError::Bound { field, bound, found } => {
            file.refuse(vec![format!("{field} must be {bound}, found {found}")])
        }
        error => file.refuse(vec![error.to_string()]),
    })?;
    let unknown = renamed(file, &NAMES, &config);
    Ok(Described { config, names: &NAMES, unknown })
}
