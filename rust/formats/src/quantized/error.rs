//! [`QuantizedError`]: the tensors of a quantized weight do not fit together.

use crate::dtype::Dtype;

/// The tensors that store a quantized weight are missing or inconsistent.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum QuantizedError {
    #[error("has no tensor {part:?}, which the {method} weight {weight:?} requires")]
    PartMissing { method: &'static str, weight: String, part: String },
    #[error("{method} tensor {tensor:?} must have dtype {}, got {dtype}", either(allowed))]
    PartDtype { method: &'static str, tensor: String, dtype: Dtype, allowed: Vec<Dtype> },
    #[error("shape of tensor {tensor:?} must be {expected}, got {shape:?}")]
    PartShape { tensor: String, shape: Vec<usize>, expected: String },
    #[error("element {index} of tensor {tensor:?} must be {limit}, got {value}")]
    PartValue { tensor: String, index: usize, value: String, limit: String },
    #[error("tensor {tensor:?} has dtype {dtype}, for which quantization_config describes no weights")]
    PartKind { tensor: String, dtype: Dtype },
    #[error(
        "tensor {tensor:?} is sparse, so quantization_config must have a symmetric scheme for it, got asymmetric ones"
    )]
    SparseAsymmetric { tensor: String },
    #[error("tensor {tensor:?} is not a valid quantization state: {error}")]
    QuantState { tensor: String, error: String },
}

fn either(dtypes: &[Dtype]) -> String {
    let names: Vec<_> = dtypes.iter().map(|dtype| dtype.name()).collect();
    names.join(" or ")
}
