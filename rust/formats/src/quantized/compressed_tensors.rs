//! compressed-tensors, as LLM Compressor saves it; quantized activations are not used.
//!
//! Tensors of a packed module: `weight_packed` I32 `[outputs, inputs * bits / 32]`, each row a stream of codes, offset
//! to be non-negative; `weight_shape`, outputs and inputs; `weight_scale`; `weight_zero_point` I32 `[outputs * bits /
//! 32, groups]`, each column a stream; `weight_g_idx` I32 `[inputs]`. Tensors of other modules: `weight` I8 or F8
//! `[outputs, inputs]` with `weight_scale` and `weight_zero_point` I8. There is one scale per tensor, per output, per
//! group of an output's inputs, or per block. Either of the latter may be sparse ([`masked`](super::masked)), as weights
//! that are not quantized may be.
//!
//! <https://github.com/vllm-project/compressed-tensors/tree/main/src/compressed_tensors/compressors>

use std::num::NonZeroUsize;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::dequantize::Quantized;
use super::error::QuantizedError;
use super::float8::{FLOATS, numbers};
use super::fp8::{scale_grid, scaled};
use super::grid::Grid;
use super::grouped::{Codes, Grouped, Groups, Zeros};
use super::masked::{Mask, Values};
use super::parts::{Parts, expect_shape, shape_fault, value_fault};
use super::streams::Streams;
use crate::dtype::{Dtype, FloatDtype};
use crate::tensor::Tensor;

/// Tensor names of a packed module.
pub(super) const PARTS: &[&str] = &["weight_packed", COMPRESSED, "weight.compressed"];

/// Tensor name of the stored values of a sparse module; its first versions put it after the name of the weight.
const COMPRESSED: &str = "compressed";

/// compressed-tensors quantization.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CompressedTensors {
    /// The schemes in the checkpoint; the tensors of a weight determine its scheme.
    pub weights: Vec<CompressedWeights>,
}

/// Quantization scheme of some weights.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CompressedWeights {
    /// Type of the codes.
    pub kind: CompressedKind,
    /// Bits per code.
    pub bits: CompressedBits,
    /// Whether the zero point is the middle code.
    pub symmetric: bool,
    /// Number of inputs that share a scale; `None` for one scale per output or per tensor.
    pub group_size: Option<NonZeroUsize>,
    /// Outputs and inputs that share a scale.
    pub block: Option<[NonZeroUsize; 2]>,
}

/// Type of the codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CompressedKind {
    /// Integers.
    Int,
    /// Floating-point numbers.
    Float,
}

/// Bits per code: 2, 4 or 8.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct CompressedBits(u32);

impl TryFrom<u32> for CompressedBits {
    type Error = String;

    fn try_from(bits: u32) -> Result<Self, String> {
        if matches!(bits, 2 | 4 | 8) { Ok(Self(bits)) } else { Err(format!("bits must be 2, 4 or 8, got {bits}")) }
    }
}

impl From<CompressedBits> for u32 {
    fn from(bits: CompressedBits) -> Self {
        bits.0
    }
}

impl CompressedTensors {
    pub(super) fn weight<'a>(&self, parts: &Parts<'a>, name: &str) -> Result<Option<Quantized<'a>>, QuantizedError> {
        let of_kind = |kind| self.weights.iter().filter(move |weights| weights.kind == kind);
        let packed = name.strip_suffix(".weight").and_then(|module| parts.find(&format!("{module}.weight_packed")));
        let plain = parts.find(name);
        if let (None, Some(compressed)) = (packed.or(plain), compressed_of(parts, name)) {
            return self.sparse(parts, name, compressed).map(Some);
        }
        let (tensor, kind) = match (packed, plain) {
            (_, Some(codes)) if codes.dtype == Dtype::I8 => (codes, CompressedKind::Int),
            (_, Some(codes)) if FLOATS.contains(&codes.dtype) => (codes, CompressedKind::Float),
            (Some(words), None) => (words, CompressedKind::Int),
            _ => return Ok(None),
        };
        // A weight has the first scheme that its tensors fit; if there is none, the error of the first is reported.
        let mut found = of_kind(kind).map(|weights| match (plain, kind) {
            (None, _) => weights.packed(parts, name, tensor),
            (Some(_), CompressedKind::Int) => weights.bytes(parts, name, tensor),
            (Some(_), CompressedKind::Float) => {
                scaled(parts, tensor, parts.require(name, &format!("{name}_scale"))?, weights.float_block())
            }
        });
        let Some(first) = found.next() else {
            return Err(QuantizedError::PartKind { tensor: tensor.name.to_owned(), dtype: tensor.dtype });
        };
        if first.is_ok() { first.map(Some) } else { found.find(Result::is_ok).unwrap_or(first).map(Some) }
    }

    /// Returns a sparse weight: floating-point numbers, or codes of the first scheme that its scales fit.
    fn sparse<'a>(
        &self,
        parts: &Parts<'a>,
        name: &str,
        compressed: Tensor<'a>,
    ) -> Result<Quantized<'a>, QuantizedError> {
        let mask = Mask::new(parts, name, compressed)?;
        if let Some(float) = FloatDtype::of(compressed.dtype) {
            return Ok(mask.with(Values::Float(float)));
        }
        let kind = if compressed.dtype == Dtype::I8 { CompressedKind::Int } else { CompressedKind::Float };
        let of_kind = self.weights.iter().filter(|weights| weights.kind == kind);
        let (Some(numbers), true) = (numbers(compressed.dtype), of_kind.clone().next().is_some()) else {
            return Err(QuantizedError::PartKind { tensor: compressed.name.to_owned(), dtype: compressed.dtype });
        };
        // A code of zero must be the weight zero.
        let schemes = of_kind.filter(|weights| weights.symmetric);
        if schemes.clone().next().is_none() {
            return Err(QuantizedError::SparseAsymmetric { tensor: compressed.name.to_owned() });
        }
        if let Some(zeros) = parts.find(&format!("{name}_zero_point"))
            && let Some(byte) = zeros.bytes.iter().position(|byte| *byte != 0)
        {
            parts.expect_dtype(&zeros, &[Dtype::I8])?;
            let limit = "0, because the elements of a sparse weight that are not stored are 0";
            return Err(value_fault(&zeros, byte, zeros.bytes[byte].cast_signed(), limit));
        }
        let scales = parts.require(name, &format!("{name}_scale"))?;
        let shape = [mask.outputs, mask.inputs];
        let mut found = schemes.map(|weights| scale_grid(parts, scales, shape, weights.float_block()));
        let first = found.next().expect("a scheme");
        let (scales, block) = if first.is_ok() { first? } else { found.find(Result::is_ok).unwrap_or(first)? };
        Ok(mask.with(Values::Scaled { numbers, scales, block }))
    }
}

/// Returns the stored values of a sparse weight, if it is one.
fn compressed_of<'a>(parts: &Parts<'a>, name: &str) -> Option<Tensor<'a>> {
    let module = name.strip_suffix(".weight")?;
    parts.find(&format!("{module}.{COMPRESSED}")).or_else(|| parts.find(&format!("{name}.{COMPRESSED}")))
}

impl CompressedWeights {
    /// Returns the block size of codes that have one scale per block of outputs and inputs.
    fn float_block(&self) -> Option<[NonZeroUsize; 2]> {
        self.block.or_else(|| Some([NonZeroUsize::MIN, self.group_size?]))
    }

    fn packed<'a>(&self, parts: &Parts<'a>, name: &str, words: Tensor<'a>) -> Result<Quantized<'a>, QuantizedError> {
        parts.expect_dtype(&words, &[Dtype::I32])?;
        let [outputs, width] = parts.expect_matrix(&words)?;
        let shape = parts.require(name, &format!("{name}_shape"))?;
        let inputs = inputs_of(parts, &shape, outputs)?;
        let bits = self.bits.0;
        if inputs == 0 || outputs == 0 || inputs.checked_mul(8).is_none() || Streams::words_of(inputs, bits) != width {
            let expected = format!("[{outputs}, {inputs} * {bits} / 32], as in {}", shape.name);
            return Err(shape_fault(&words, expected));
        }
        let codes = Codes::Streams(Streams { words, strides: [width, 1], length: width, bits });
        self.grouped(parts, name, codes, [outputs, inputs])
    }

    fn bytes<'a>(&self, parts: &Parts<'a>, name: &str, codes: Tensor<'a>) -> Result<Quantized<'a>, QuantizedError> {
        let [outputs, inputs] = parts.expect_matrix(&codes)?;
        if outputs == 0 || inputs == 0 {
            return Err(shape_fault(&codes, "[outputs, inputs], both > 0".to_owned()));
        }
        self.grouped(parts, name, Codes::Bytes(codes), [outputs, inputs])
    }

    fn grouped<'a>(
        &self,
        parts: &Parts<'a>,
        name: &str,
        codes: Codes<'a>,
        [outputs, inputs]: [usize; 2],
    ) -> Result<Quantized<'a>, QuantizedError> {
        let scales = parts.require(name, &format!("{name}_scale"))?;
        let size = self.group_size.map_or(inputs, NonZeroUsize::get).min(inputs);
        let count = inputs.div_ceil(size);
        let strides = if self.group_size.is_some() {
            expect_shape(&scales, &[&[outputs, count]])?;
            [count, 1]
        } else {
            expect_shape(&scales, &[&[outputs, 1], &[outputs], &[1], &[1, 1], &[]])?;
            [usize::from(scales.elements() == outputs), 0]
        };
        // The offset that makes all codes non-negative.
        let (bits, middle) = match codes {
            Codes::Bytes(_) => (None, 128),
            _ => (Some(self.bits.0), 1u8 << (self.bits.0 - 1)),
        };
        let zero_point = format!("{name}_zero_point");
        let zeros = match (parts.find(&zero_point), bits) {
            (None, _) if self.symmetric => Zeros::Constant(middle),
            (None, _) => return parts.require(name, &zero_point).map(|_| unreachable!("it is not there")),
            (Some(words), Some(bits)) if words.dtype == Dtype::I32 => {
                let length = Streams::words_of(outputs, bits);
                expect_shape(&words, &[&[length, count]])?;
                Zeros::Streams(Streams { words, strides: [1, count], length, bits })
            }
            (Some(tensor), _) => {
                parts.expect_dtype(&tensor, &[Dtype::I8])?;
                expect_shape(&tensor, &[scales.shape])?;
                Zeros::Bytes { tensor, strides, plus: i16::from(middle) }
            }
        };
        let groups = match parts.find(&format!("{name}_g_idx")) {
            Some(groups) if !is_unset(&groups) => {
                parts.expect_dtype(&groups, &[Dtype::I32])?;
                expect_shape(&groups, &[&[inputs]])?;
                Groups::listed(groups, count, size)?
            }
            _ => Groups::Even(size),
        };
        let grouped = Grouped { inputs, codes, scales: Grid::new(parts, scales, strides)?, zeros, groups };
        Ok(Quantized { shape: vec![outputs, inputs], numbers: Arc::new(grouped) })
    }
}

/// Returns whether every group index is -1, the initial value.
fn is_unset(groups: &Tensor<'_>) -> bool {
    groups.bytes.iter().all(|byte| *byte == u8::MAX)
}

/// Returns the second number of `weight_shape`; the first must be `outputs`.
fn inputs_of<'a>(parts: &Parts<'a>, shape: &Tensor<'a>, outputs: usize) -> Result<usize, QuantizedError> {
    parts.expect_dtype(shape, &[Dtype::I64, Dtype::I32])?;
    expect_shape(shape, &[&[2]])?;
    let number = |index: usize| match shape.dtype {
        Dtype::I64 => i64::from_le_bytes(shape.bytes.as_chunks().0[index]),
        _ => i64::from(i32::from_le_bytes(shape.bytes.as_chunks().0[index])),
    };
    if number(0) != outputs as i64 {
        return Err(value_fault(shape, 0, number(0), outputs));
    }
    usize::try_from(number(1)).map_err(|_| value_fault(shape, 1, number(1), "the number of inputs"))
}
