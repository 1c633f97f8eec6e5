//! [`WeightTensor`]: a weight of a model, whose numbers can be read as f32 however they are stored.

use std::ops::Range;
use std::path::Path;

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::blocks::BlockLayout;
use crate::dtype::FloatDtype;
use crate::error::{CheckpointError, InFile};
use crate::gguf::BlockType;
use crate::quantized::Quantized;
use crate::tensor::Tensor;

/// A tensor whose numbers can be read as f32: what a model's weights are taken from.
#[derive(Clone, Debug)]
pub struct WeightTensor<'a> {
    pub(crate) name: String,
    pub(crate) numbers: Numbers<'a>,
    /// What lists the checkpoint's tensors.
    pub(crate) listing: &'a Path,
}

/// How the numbers of a weight are stored.
#[derive(Clone, Debug)]
pub(crate) enum Numbers<'a> {
    /// One by one.
    Float(FloatDtype, Tensor<'a>),
    /// In blocks of a type of ggml, whose bytes the tensor has; this is the shape of their elements.
    Blocks(BlockType, &'a [usize], Tensor<'a>),
    /// In fewer bits, in several tensors.
    Quantized(Quantized<'a>),
}

impl<'a> WeightTensor<'a> {
    /// Its name in the checkpoint; that of the plain tensor in place of which there are others.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its dimensions, the slowest first; none for a scalar.
    pub fn shape(&self) -> &[usize] {
        match &self.numbers {
            Numbers::Float(_, tensor) => tensor.shape,
            Numbers::Blocks(_, shape, _) => shape,
            Numbers::Quantized(quantized) => &quantized.shape,
        }
    }

    /// The number of its elements.
    pub fn elements(&self) -> usize {
        self.shape().iter().product()
    }

    /// The type of its elements, where each is a floating-point number of its own.
    pub fn float_dtype(&self) -> Option<FloatDtype> {
        match self.numbers {
            Numbers::Float(float, _) => Some(float),
            Numbers::Blocks(..) | Numbers::Quantized(_) => None,
        }
    }

    /// Whether its numbers are stored in fewer bits than floating-point numbers have.
    pub fn is_quantized(&self) -> bool {
        self.float_dtype().is_none()
    }

    /// Whether its outputs come before its inputs even where modules of its kind are stored the other way round: those
    /// of GPT-2 are, until they are quantized.
    pub fn is_outputs_first(&self) -> bool {
        matches!(self.numbers, Numbers::Quantized(_))
    }

    /// Holds the numbers that turn the codes of these elements into weights, and perhaps those of others, against what
    /// they may be; of plain weights any are taken.
    ///
    /// # Errors
    /// [`Fault::PartValue`] for the first that cannot be.
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

    /// The layout of its rows' blocks, where kernels can take them as they are.
    pub fn blocks(&self) -> Option<BlockLayout> {
        match &self.numbers {
            Numbers::Float(..) => None,
            Numbers::Blocks(ty, ..) => ty.layout(),
            Numbers::Quantized(quantized) => quantized.numbers.blocks(),
        }
    }

    /// Writes blocks of [`blocks`](Self::blocks), as many as `out` holds, from the one of element `first` on.
    ///
    /// # Panics
    /// If there are none, `first` or `out.len()` is within a block, or the tensor ends before.
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

    /// About how many bits a number takes where it is stored.
    pub fn stored_bits(&self) -> f64 {
        let bytes: usize = self.stored().iter().map(|tensor| tensor.bytes.len()).sum();
        bytes as f64 * 8.0 / self.elements().max(1) as f64
    }

    /// The stored tensors that it is read from.
    pub(crate) fn stored(&self) -> Vec<Tensor<'_>> {
        match &self.numbers {
            Numbers::Float(_, tensor) | Numbers::Blocks(_, _, tensor) => vec![*tensor],
            Numbers::Quantized(quantized) => quantized.numbers.parts(),
        }
    }

    /// Reads `out.len()` elements, from element `first` on in row-major order: floats exactly, codes with their scales. Of
    /// quantized weights neighbouring rows together cost less than one by one.
    ///
    /// # Panics
    /// If the tensor has fewer than `first + out.len()` elements, as slicing does.
    pub fn read_f32(&self, first: usize, out: &mut [f32]) {
        match &self.numbers {
            Numbers::Float(float, tensor) => widen(*float, tensor.bytes, first, out),
            Numbers::Blocks(ty, _, tensor) => ty.dequantize(tensor.bytes, first, out),
            Numbers::Quantized(quantized) => {
                assert!(out.len() <= self.elements().saturating_sub(first), "elements of {}", self.name);
                quantized.numbers.read(first, out);
            }
        }
    }

    /// As [`WeightTensor::read_f32`], of every `stride`-th element.
    ///
    /// # Panics
    /// If the tensor ends before the last of them.
    pub fn read_f32_strided(&self, first: usize, stride: usize, out: &mut [f32]) {
        for (index, value) in out.iter_mut().enumerate() {
            self.read_f32(first + index * stride, std::slice::from_mut(value));
        }
    }
}

/// Widens elements of little-endian `bytes` from `first` on.
fn widen(float: FloatDtype, bytes: &[u8], first: usize, out: &mut [f32]) {
    let size = float.bytes();
    let bytes = &bytes[first * size..][..out.len() * size];
    match float {
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
