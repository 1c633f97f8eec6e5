//! [`Tensor`]: a typed view of mapped bytes.

use crate::dtype::Dtype;

/// A stored tensor of any type: row-major, little-endian, with any alignment.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    pub(crate) name: &'a str,
    pub(crate) dtype: Dtype,
    pub(crate) shape: &'a [usize],
    pub(crate) bytes: &'a [u8],
    /// Index of the file, and the offset of the tensor in it.
    pub(crate) shard: usize,
    pub(crate) offset: usize,
}

impl<'a> Tensor<'a> {
    /// Returns the name in the checkpoint.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Returns the dimensions, slowest first; empty for a scalar.
    pub fn shape(&self) -> &'a [usize] {
        self.shape
    }

    /// Returns the stored bytes.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Returns an element of a tensor of 32-bit or 64-bit integers; `None` for other types, and past the end.
    pub fn integer(&self, index: usize) -> Option<i64> {
        match self.dtype {
            Dtype::I32 => self.bytes.as_chunks().0.get(index).map(|bytes| i32::from_le_bytes(*bytes).into()),
            Dtype::I64 => self.bytes.as_chunks().0.get(index).map(|bytes| i64::from_le_bytes(*bytes)),
            _ => None,
        }
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Looks tensors up by name.
pub(crate) trait FindTensor {
    /// Returns the tensor of that name, if there is one.
    fn find(&self, name: &str) -> Option<Tensor<'_>>;
}
