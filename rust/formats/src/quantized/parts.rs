//! The tensors of a quantized weight, found and held against each other.

use super::error::QuantizedError;
use crate::dtype::Dtype;
use crate::tensor::{FindTensor, Tensor};

/// Where a method looks for its tensors.
pub(super) struct Parts<'a> {
    pub tensors: &'a dyn FindTensor,
    /// For messages.
    pub method: &'static str,
}

impl<'a> Parts<'a> {
    /// The tensor of that name, if there is one.
    pub fn find(&self, name: &str) -> Option<Tensor<'a>> {
        self.tensors.find(name)
    }

    /// The tensor of that name, without which the weight cannot be.
    pub fn require(&self, weight: &str, name: &str) -> Result<Tensor<'a>, QuantizedError> {
        self.find(name).ok_or_else(|| QuantizedError::PartMissing {
            method: self.method,
            weight: weight.to_owned(),
            part: name.to_owned(),
        })
    }

    /// Refuses other types of elements than these.
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

    /// The two dimensions of a matrix.
    pub fn expect_matrix(&self, tensor: &Tensor<'a>) -> Result<[usize; 2], QuantizedError> {
        tensor.shape.try_into().map_err(|_| shape_fault(tensor, "a matrix".to_owned()))
    }
}

/// Refuses other shapes than these, the first of which is the usual one.
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

/// What is wrong with one number of a tensor.
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
