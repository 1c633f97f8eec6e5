//! A tensor of a checkpoint: a typed view of mapped bytes.

use std::ops::Deref;

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::dtype::{Dtype, FloatDtype};

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

/// A tensor whose elements are F32, F16 or BF16, and so can be read as f32 without loss.
#[derive(Clone, Copy, Debug)]
pub struct FloatTensor<'a> {
    pub(crate) tensor: Tensor<'a>,
    pub(crate) float: FloatDtype,
}

impl<'a> Deref for FloatTensor<'a> {
    type Target = Tensor<'a>;

    fn deref(&self) -> &Tensor<'a> {
        &self.tensor
    }
}

impl FloatTensor<'_> {
    /// The type of its elements.
    pub fn float_dtype(&self) -> FloatDtype {
        self.float
    }

    /// Widens `out.len()` elements, from element `first` on in row-major order, exactly.
    ///
    /// # Panics
    /// If the tensor has fewer than `first + out.len()` elements, as slicing does.
    pub fn read_f32(&self, first: usize, out: &mut [f32]) {
        let size = self.float.bytes();
        let bytes = &self.tensor.bytes[first * size..][..out.len() * size];
        match self.float {
            FloatDtype::F32 => {
                for (value, stored) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *value = f32::from_le_bytes(*stored);
                }
            }
            FloatDtype::Bf16 => {
                for (value, stored) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *value = f32::from_bits(u32::from(u16::from_le_bytes(*stored)) << 16);
                }
            }
            FloatDtype::F16 => widen_f16(bytes.as_chunks().0, out),
        }
    }

    /// As [`FloatTensor::read_f32`], of every `stride`-th element.
    ///
    /// # Panics
    /// If the tensor ends before the last of them.
    pub fn read_f32_strided(&self, first: usize, stride: usize, out: &mut [f32]) {
        for (index, value) in out.iter_mut().enumerate() {
            self.read_f32(first + index * stride, std::slice::from_mut(value));
        }
    }
}

/// In blocks, so that `half` can use the machine's own conversion on elements that need not be aligned in the file.
fn widen_f16(stored: &[[u8; 2]], out: &mut [f32]) {
    const BLOCK: usize = 256;
    let mut aligned = [f16::ZERO; BLOCK];
    for (stored, out) in stored.chunks(BLOCK).zip(out.chunks_mut(BLOCK)) {
        let aligned = &mut aligned[..stored.len()];
        for (value, bytes) in aligned.iter_mut().zip(stored) {
            *value = f16::from_le_bytes(*bytes);
        }
        aligned.convert_to_f32_slice(out);
    }
}
