//! The metadata of a GGUF file, by key. Strings and arrays stay in the mapped file and are read on request.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// The bytes of a mapped file.
pub(crate) type Bytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// A metadata key is absent or has an unsupported value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key} must be {bound}, found {found}")]
pub struct MetadataError {
    /// The key.
    pub key: String,
    /// The accepted values.
    pub bound: String,
    /// The value in the file.
    pub found: String,
}

impl MetadataError {
    pub(crate) fn new(key: impl Into<String>, bound: impl Into<String>, found: impl Into<String>) -> Self {
        Self { key: key.into(), bound: bound.into(), found: found.into() }
    }
}

/// A metadata value. Ranges refer to the file's bytes; the parser has checked their contents.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    Unsigned(u64),
    Signed(i64),
    /// The shortest decimal number that rounds to the stored f32 or f64.
    Float(f64),
    Bool(bool),
    Text(Range<usize>),
    /// This many strings, each preceded by its length in 8 bytes.
    Texts(usize, Range<usize>),
    /// 4-byte integers.
    Words(Range<usize>),
    /// 4-byte floats.
    Floats(Range<usize>),
    /// Any other array.
    Array,
}

impl Value {
    fn what(&self) -> String {
        match self {
            Self::Unsigned(number) => number.to_string(),
            Self::Signed(number) => number.to_string(),
            Self::Float(number) => number.to_string(),
            Self::Bool(value) => value.to_string(),
            Self::Text(_) => "a text".into(),
            Self::Texts(..) => "a list of texts".into(),
            Self::Words(_) => "a list of numbers".into(),
            Self::Floats(_) => "a list of floats".into(),
            Self::Array => "a list".into(),
        }
    }
}

/// The metadata of a GGUF file.
#[derive(Clone)]
pub struct Metadata {
    bytes: Bytes,
    values: BTreeMap<String, Value>,
}

impl std::fmt::Debug for Metadata {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metadata").field("keys", &self.values.len()).finish_non_exhaustive()
    }
}

impl Metadata {
    pub(crate) fn new(bytes: Bytes, values: BTreeMap<String, Value>) -> Self {
        Self { bytes, values }
    }

    /// The architecture that the file names.
    ///
    /// # Errors
    /// `general.architecture` is absent or not a string.
    pub fn architecture(&self) -> Result<&str, MetadataError> {
        let key = "general.architecture";
        self.text(key)?.ok_or_else(|| MetadataError::new(key, "given", "none"))
    }

    /// Returns a string.
    ///
    /// # Errors
    /// The value is not a string, or not UTF-8.
    pub fn text(&self, key: &str) -> Result<Option<&str>, MetadataError> {
        let refused = |found: String| Err(MetadataError::new(key, "a text in UTF-8", found));
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Text(range)) => match std::str::from_utf8(self.slice(range)) {
                Ok(text) => Ok(Some(text)),
                Err(_) => refused("other bytes".into()),
            },
            Some(value) => refused(value.what()),
        }
    }

    /// Returns an integer, 0 or greater.
    ///
    /// # Errors
    /// The value is not an integer, or is negative.
    pub fn number(&self, key: &str) -> Result<Option<u64>, MetadataError> {
        let found = match self.values.get(key) {
            None => return Ok(None),
            Some(Value::Unsigned(number)) => return Ok(Some(*number)),
            Some(Value::Signed(number)) => u64::try_from(*number).map_err(|_| number.to_string()),
            Some(value) => Err(value.what()),
        };
        found.map(Some).map_err(|found| MetadataError::new(key, "a whole number, 0 or greater", found))
    }

    /// Returns a finite number.
    ///
    /// # Errors
    /// The value is not a finite number.
    pub fn float(&self, key: &str) -> Result<Option<f64>, MetadataError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Float(number)) if number.is_finite() => Ok(Some(*number)),
            Some(value) => Err(MetadataError::new(key, "a finite float", value.what())),
        }
    }

    /// Returns a boolean.
    ///
    /// # Errors
    /// The value is not a boolean.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, MetadataError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(value) => Err(MetadataError::new(key, "true or false", value.what())),
        }
    }

    /// Returns a list of strings as bytes, because tokens need not be UTF-8.
    ///
    /// # Errors
    /// The value is not a list of strings.
    pub fn texts(&self, key: &str) -> Result<Option<Texts<'_>>, MetadataError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Texts(count, range)) => Ok(Some(Texts { left: *count, rest: self.slice(range) })),
            Some(value) => Err(MetadataError::new(key, "a list of texts", value.what())),
        }
    }

    /// Returns a list of 32-bit integers; negative ones wrap to large values.
    ///
    /// # Errors
    /// The value is not a list of 32-bit integers.
    pub fn words(&self, key: &str) -> Result<Option<impl ExactSizeIterator<Item = u32>>, MetadataError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Words(range)) => {
                let words = self.slice(range).as_chunks::<4>().0;
                Ok(Some(words.iter().map(|&word| u32::from_le_bytes(word))))
            }
            Some(value) => Err(MetadataError::new(key, "a list of 32-bit numbers", value.what())),
        }
    }

    /// Returns a list of 32-bit floats, which may be infinite or NaN.
    ///
    /// # Errors
    /// The value is not a list of 32-bit floats.
    pub fn floats(&self, key: &str) -> Result<Option<impl ExactSizeIterator<Item = f32>>, MetadataError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Floats(range)) => {
                let floats = self.slice(range).as_chunks::<4>().0;
                Ok(Some(floats.iter().map(|&float| f32::from_le_bytes(float))))
            }
            Some(value) => Err(MetadataError::new(key, "a list of 32-bit floats", value.what())),
        }
    }

    fn slice(&self, range: &Range<usize>) -> &[u8] {
        (*self.bytes).as_ref().get(range.clone()).unwrap_or_default()
    }
}

/// The strings of a list, in order.
#[derive(Clone, Debug)]
pub struct Texts<'a> {
    left: usize,
    rest: &'a [u8],
}

impl<'a> Iterator for Texts<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        self.left = self.left.checked_sub(1)?;
        let (length, rest) = self.rest.split_first_chunk::<8>()?;
        let (text, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
        self.rest = rest;
        Some(text)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Texts<'_> {}
