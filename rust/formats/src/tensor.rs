//! [`Tensor`]: a typed view of mapped bytes.

use crate::dtype::Dtype;

/// A stored tensor of any type. Row-major, little-endian, at no particular alignment.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    pub(crate) name: &'a str,
    pub(crate) dtype: Dtype,
    pub(crate) shape: &'a [usize],
    pub(crate) bytes: &'a [u8],
    /// The file that it lies in, and where.
    pub(crate) shard: usize,
    pub(crate) offset: usize,
}

impl<'a> Tensor<'a> {
    /// Its name in the checkpoint.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// The type of its elements.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Its dimensions, the slowest first; none for a scalar.
    pub fn shape(&self) -> &'a [usize] {
        self.shape
    }

    /// Its elements as stored.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The number of its elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Looks tensors up by name.
pub(crate) trait FindTensor {
    /// Returns the tensor of that name, if there is one.
    fn find(&self, name: &str) -> Option<Tensor<'_>>;
}
