//! The report on a quantized copy: sizes, errors, and scores on a text.

use std::path::Path;

use serde::{Serialize, Serializer};
use tidegate_model::WeightType;

use crate::eval::EvalReport;

/// Bytes of the tensors of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GroupBytes {
    /// The kind.
    pub name: &'static str,
    /// Number of tensors.
    pub tensors: u64,
    /// Their bytes in `model.safetensors`.
    pub before: u64,
    /// Their bytes in `model.gguf`.
    pub after: u64,
}

/// The error of all matrices with one name, over all layers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MatrixError {
    /// The name without its layer.
    pub name: String,
    /// Number of matrices.
    pub tensors: u64,
    /// Length of a row.
    pub columns: usize,
    /// The stored type: f16 if `columns` is not a multiple of the requested type's block.
    #[serde(serialize_with = "name")]
    pub stored_as: WeightType,
    /// `sqrt(sum (quantized - w)^2 / sum w^2)`.
    pub relative_error: f64,
}

/// The scores of the original and the quantized model on a text.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// The text's file name.
    pub text: String,
    /// The maximum number of predicted tokens; `None` for all.
    pub limit: Option<u64>,
    /// The original's score.
    pub before: EvalReport,
    /// The quantized model's score.
    pub after: EvalReport,
    /// Perplexity after minus before.
    pub perplexity_difference: f64,
    /// Bits per byte after minus before.
    pub bits_per_byte_difference: f64,
}

impl Comparison {
    /// Compares two scores on one text.
    pub fn new(text: &Path, limit: Option<u64>, before: EvalReport, after: EvalReport) -> Self {
        Self {
            text: text.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
            limit,
            perplexity_difference: after.perplexity - before.perplexity,
            bits_per_byte_difference: after.bits_per_byte - before.bits_per_byte,
            before,
            after,
        }
    }
}

/// The report on a quantized copy.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct QuantizeReport {
    /// The requested type.
    #[serde(serialize_with = "name")]
    pub to: WeightType,
    /// Bytes by kind of tensor.
    pub groups: Vec<GroupBytes>,
    /// Errors by name of matrix.
    pub matrices: Vec<MatrixError>,
    /// The scores on a text, if one was given.
    pub on_text: Option<Comparison>,
}

impl QuantizeReport {
    /// The matrices stored as f16 because their rows are not a multiple of the block.
    pub fn in_f16(&self) -> impl Iterator<Item = &MatrixError> {
        self.matrices.iter().filter(|matrix| matrix.stored_as != self.to)
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature serde requires")]
fn name<S: Serializer>(kind: &WeightType, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(kind.name())
}
