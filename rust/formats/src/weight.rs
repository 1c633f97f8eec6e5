//! [`WeightTensor`]: a weight of a model, whose values can be read as f32 however they are stored.

use std::ops::Range;
use std::path::Path;

use crate::blocks::BlockLayout;
use crate::dtype::FloatDtype;
use crate::error::{CheckpointError, InFile};
use crate::gguf::BlockType;
use crate::quantized::Quantized;
use crate::table::RowFormat;
use crate::tensor::Tensor;

/// A weight of a model, whose values can be read as f32.
#[derive(Clone, Debug)]
pub struct WeightTensor<'a> {
    pub(crate) name: String,
    pub(crate) numbers: Numbers<'a>,
    /// Path of the file that lists the checkpoint's tensors.
    pub(crate) listing: &'a Path,
}

/// Storage of the values of a weight.
#[derive(Clone, Debug)]
pub(crate) enum Numbers<'a> {
    /// Floating-point numbers, one by one.
    Float(FloatDtype, Tensor<'a>),
    /// Blocks of ggml: the block type, the shape of the values, and the tensor of bytes.
    Blocks(BlockType, &'a [usize], Tensor<'a>),
    /// Several tensors of a quantization method.
    Quantized(Quantized<'a>),
}

impl<'a> WeightTensor<'a> {
    /// Returns the name in the checkpoint; for a quantized weight, the name that a plain tensor would have.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the dimensions, slowest first; empty for a scalar.
    pub fn shape(&self) -> &[usize] {
        match &self.numbers {
            Numbers::Float(_, tensor) => tensor.shape,
            Numbers::Blocks(_, shape, _) => shape,
            Numbers::Quantized(quantized) => &quantized.shape,
        }
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> usize {
        self.shape().iter().product()
    }

    /// Returns the element type if the weight is not quantized.
    pub fn float_dtype(&self) -> Option<FloatDtype> {
        match self.numbers {
            Numbers::Float(float, _) => Some(float),
            Numbers::Blocks(..) | Numbers::Quantized(_) => None,
        }
    }

    /// Returns whether the weight is quantized.
    pub fn is_quantized(&self) -> bool {
        self.float_dtype().is_none()
    }

    /// Returns whether the weight is certain to be stored as `[outputs, inputs]`. GPT-2 stores plain weights the other
    /// way round, but not quantized ones.
    pub fn is_outputs_first(&self) -> bool {
        matches!(self.numbers, Numbers::Quantized(_))
    }

    /// Checks the scales and zero points of some elements, and possibly of others. Any plain weight passes.
    ///
    /// # Errors
    /// [`QuantizedError::PartValue`](crate::QuantizedError::PartValue) for the first invalid value.
    ///
    /// # Panics
    /// If the tensor has fewer elements.
    pub fn check(&self, elements: Range<usize>) -> Result<(), CheckpointError> {
        match &self.numbers {
            Numbers::Float(..) | Numbers::Blocks(..) => Ok(()),
            Numbers::Quantized(quantized) => {
                assert!(elements.end <= self.elements(), "elements of {}", self.name);
                quantized.numbers.check(elements).in_file(self.listing)
            }
        }
    }

    /// Returns the layout of the weight's blocks, if kernels can multiply them directly.
    pub fn blocks(&self) -> Option<BlockLayout> {
        match &self.numbers {
            Numbers::Float(..) => None,
            Numbers::Blocks(ty, ..) => ty.layout(),
            Numbers::Quantized(quantized) => quantized.numbers.blocks(),
        }
    }

    /// Fills `out` with blocks of the layout [`blocks`](Self::blocks), starting with the block of element `first`.
    ///
    /// # Panics
    /// If the weight has no blocks, `first` or `out.len()` is inside a block, or the tensor has fewer blocks.
    pub fn read_blocks(&self, first: usize, out: &mut [u8]) {
        match &self.numbers {
            Numbers::Float(..) => {
                panic!("{} is not stored in blocks (element {first}, {} bytes)", self.name, out.len())
            }
            Numbers::Blocks(ty, _, tensor) => {
                let aligned = first.is_multiple_of(ty.inputs()) && out.len().is_multiple_of(ty.bytes());
                assert!(aligned, "whole blocks of {} (element {first}, {} bytes)", ty.name(), out.len());
                out.copy_from_slice(&tensor.bytes[first / ty.inputs() * ty.bytes()..][..out.len()]);
            }
            Numbers::Quantized(quantized) => quantized.numbers.read_blocks(first, out),
        }
    }

    /// Returns the stored bits per element, including scales.
    pub fn stored_bits(&self) -> f64 {
        let bytes: usize = self.stored().iter().map(|tensor| tensor.bytes.len()).sum();
        bytes as f64 * 8.0 / self.elements().max(1) as f64
    }

    /// Returns the storage of rows that can be read one by one, if the weight is a plain tensor or in ggml's blocks.
    pub fn row_format(&self) -> Option<RowFormat> {
        match self.numbers {
            Numbers::Float(float, _) => Some(RowFormat::Float(float)),
            Numbers::Blocks(ty, ..) => Some(RowFormat::Blocks(ty)),
            Numbers::Quantized(_) => None,
        }
    }

    /// Returns the stored tensors that the weight is read from.
    pub(crate) fn stored(&self) -> Vec<Tensor<'_>> {
        match &self.numbers {
            Numbers::Float(_, tensor) | Numbers::Blocks(_, _, tensor) => vec![*tensor],
            Numbers::Quantized(quantized) => quantized.numbers.parts(),
        }
    }

    /// Reads `out.len()` elements from `first` on, in row-major order. Quantized elements are dequantized; reading
    /// several rows at once is then faster than one by one.
    ///
    /// # Panics
    /// If the tensor has fewer than `first + out.len()` elements.
    pub fn read_f32(&self, first: usize, out: &mut [f32]) {
        match &self.numbers {
            Numbers::Float(float, tensor) => float.widen(tensor.bytes, first, out),
            Numbers::Blocks(ty, _, tensor) => ty.dequantize(tensor.bytes, first, out),
            Numbers::Quantized(quantized) => {
                assert!(out.len() <= self.elements().saturating_sub(first), "elements of {}", self.name);
                quantized.numbers.read(first, out);
            }
        }
    }

    /// Reads every `stride`-th element from `first` on; see [`WeightTensor::read_f32`].
    ///
    /// # Panics
    /// If the tensor has fewer elements.
    pub fn read_f32_strided(&self, first: usize, stride: usize, out: &mut [f32]) {
        for (index, value) in out.iter_mut().enumerate() {
            self.read_f32(first + index * stride, std::slice::from_mut(value));
        }
    }
}
