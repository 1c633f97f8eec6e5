//! Finding and checking the tensors of a quantized weight.

use super::error::QuantizedError;
use crate::dtype::Dtype;
use crate::tensor::{FindTensor, Tensor};

/// Finds the tensors of a quantized weight.
pub(super) struct Parts<'a> {
    pub tensors: &'a dyn FindTensor,
    /// Name of the quantization method, for messages.
    pub method: &'static str,
}

impl<'a> Parts<'a> {
    /// Returns the tensor of that name, if there is one.
    pub fn find(&self, name: &str) -> Option<Tensor<'a>> {
        self.tensors.find(name)
    }

    /// Returns a tensor that the weight requires.
    pub fn require(&self, weight: &str, name: &str) -> Result<Tensor<'a>, QuantizedError> {
        self.find(name).ok_or_else(|| QuantizedError::PartMissing {
            method: self.method,
            weight: weight.to_owned(),
            part: name.to_owned(),
        })
    }

    /// Checks the element type of a tensor.
    pub fn expect_dtype(&self, tensor: &Tensor<'a>, allowed: &'static [Dtype]) -> Result<(), QuantizedError> {
        if allowed.contains(&tensor.dtype) {
            return Ok(());
        }
        Err(QuantizedError::PartDtype {
            method: self.method,
            tensor: tensor.name.to_owned(),
            dtype: tensor.dtype,
            allowed: allowed.to_vec(),
        })
    }

    /// Returns the two dimensions of a matrix.
    pub fn expect_matrix(&self, tensor: &Tensor<'a>) -> Result<[usize; 2], QuantizedError> {
        tensor.shape.try_into().map_err(|_| shape_fault(tensor, "a matrix".to_owned()))
    }
}

/// Checks the shape of a tensor; the first allowed shape is the usual one.
pub(super) fn expect_shape(tensor: &Tensor<'_>, allowed: &[&[usize]]) -> Result<(), QuantizedError> {
    if allowed.contains(&tensor.shape) {
        return Ok(());
    }
    let shapes: Vec<_> = allowed.iter().map(|shape| format!("{shape:?}")).collect();
    Err(shape_fault(tensor, shapes.join(" or ")))
}

pub(super) fn shape_fault(tensor: &Tensor<'_>, expected: String) -> QuantizedError {
    QuantizedError::PartShape { tensor: tensor.name.to_owned(), shape: tensor.shape.to_vec(), expected }
}

/// Returns the error for an invalid value in a tensor.
pub(super) fn value_fault(
    tensor: &Tensor<'_>,
    index: usize,
    value: impl ToString,
    limit: impl ToString,
) -> QuantizedError {
    QuantizedError::PartValue {
        tensor: tensor.name.to_owned(),
        index,
        value: value.to_string(),
        limit: limit.to_string(),
    }
}
