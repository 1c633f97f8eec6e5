//! [`QuantizedError`]: the tensors of a quantized weight do not fit together.

use crate::dtype::Dtype;

/// The tensors that store a quantized weight are missing or inconsistent.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum QuantizedError {
    #[error("has no tensor {part:?}, without which {weight:?} of {method} cannot be read")]
    PartMissing { method: &'static str, weight: String, part: String },
    #[error("tensor {tensor:?} is stored as {dtype}; of {method} it must be {}", either(allowed))]
    PartDtype { method: &'static str, tensor: String, dtype: Dtype, allowed: Vec<Dtype> },
    #[error("tensor {tensor:?} has the shape {shape:?}; it must be {expected}")]
    PartShape { tensor: String, shape: Vec<usize>, expected: String },
    #[error("element {index} of tensor {tensor:?} is {value}; it must be {limit}")]
    PartValue { tensor: String, index: usize, value: String, limit: String },
    #[error("tensor {tensor:?} is stored as {dtype}, and quantization_config describes no weights of that kind")]
    PartKind { tensor: String, dtype: Dtype },
    #[error("tensor {tensor:?} holds no quantization state: {error}")]
    QuantState { tensor: String, error: String },
}

fn either(dtypes: &[Dtype]) -> String {
    let names: Vec<_> = dtypes.iter().map(|dtype| dtype.name()).collect();
    names.join(" or ")
}
