//! bitsandbytes (Dettmers et al. 2022, 2023): 4-bit codes that index a table, or 8-bit integers.
//!
//! Tensors of a 4-bit weight: `weight` bytes with two codes each, the first in the high half; `weight.quant_map` F32
//! `[16]`, the values of the codes; `weight.absmax`, the scales of blocks, as F32 or as 8-bit codes that
//! `weight.nested_quant_map` F32 `[256]` and `weight.nested_absmax` F32 dequantize; and
//! `weight.quant_state.bitsandbytes__nf4` or `__fp4`, JSON with the sizes. Tensors of an 8-bit weight: `weight` I8
//! `[outputs, inputs]` and `SCB` F32 `[outputs]`, 127 times the scales.
//!
//! <https://github.com/bitsandbytes-foundation/bitsandbytes/blob/main/bitsandbytes/functional.py>

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::dequantize::Quantized;
use super::error::QuantizedError;
use super::float8::numbers;
use super::grid::Grid;
use super::lookup::{BlockScales, Lookup};
use super::parts::{Parts, expect_shape, shape_fault, value_fault};
use super::scaled::Scaled;
use crate::dtype::{Dtype, FloatDtype};
use crate::tensor::Tensor;

/// Largest quantization state in bytes, above that of any known model.
const MAX_STATE: usize = 1 << 16;

/// bitsandbytes quantization.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct BitsAndBytes {
    /// Type of the codes.
    pub codes: BitsAndBytesCodes,
}

/// Type of the codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BitsAndBytesCodes {
    /// 4 bits: quantiles of the normal distribution.
    Nf4,
    /// 4 bits: floating-point numbers.
    Fp4,
    /// 8-bit integers.
    Int8,
}

/// The fields of `weight.quant_state.bitsandbytes__nf4` that are used.
#[derive(Debug, Deserialize)]
struct State {
    blocksize: NonZeroUsize,
    shape: [usize; 2],
    nested_blocksize: Option<NonZeroUsize>,
    nested_offset: Option<f32>,
}

/// Scales of blocks.
enum AbsMax<'a> {
    Plain(Tensor<'a>),
    Nested { codes: Tensor<'a>, table: Box<[f32; 256]>, scales: Tensor<'a>, block: usize, offset: f32 },
}

impl BitsAndBytes {
    pub(super) fn weight<'a>(&self, parts: &Parts<'a>, name: &str) -> Result<Option<Quantized<'a>>, QuantizedError> {
        let Some(codes) = parts.find(name) else { return Ok(None) };
        let state = match self.codes {
            BitsAndBytesCodes::Nf4 => "quant_state.bitsandbytes__nf4",
            BitsAndBytesCodes::Fp4 => "quant_state.bitsandbytes__fp4",
            BitsAndBytesCodes::Int8 => {
                return match name.strip_suffix(".weight").filter(|_| codes.dtype == Dtype::I8) {
                    Some(module) => eight_bits(parts, name, module, codes).map(Some),
                    None => Ok(None),
                };
            }
        };
        let is_quantized =
            [state, "absmax", "quant_map"].iter().any(|end| parts.find(&format!("{name}.{end}")).is_some());
        if is_quantized { four_bits(parts, name, codes, state).map(Some) } else { Ok(None) }
    }
}

fn eight_bits<'a>(
    parts: &Parts<'a>,
    name: &str,
    module: &str,
    codes: Tensor<'a>,
) -> Result<Quantized<'a>, QuantizedError> {
    let scales = parts.require(name, &format!("{module}.SCB"))?;
    let [outputs, inputs] = parts.expect_matrix(&codes)?;
    let Some(numbers) = numbers(codes.dtype).filter(|_| outputs > 0 && inputs > 0) else {
        return Err(shape_fault(&codes, "[outputs, inputs], both > 0".to_owned()));
    };
    expect_shape(&scales, &[&[outputs], &[outputs, 1]])?;
    // Layouts other than rows (0) were for specific GPUs.
    if let Some(format) = parts.find(&format!("{module}.weight_format"))
        && let Some(index) = format.bytes.iter().position(|byte| *byte != 0)
    {
        return Err(value_fault(&format, index, format.bytes[index], "0, a layout in rows"));
    }
    let scales = Grid::new(parts, scales, [1, 0])?;
    let scaled = Scaled { codes, inputs, numbers, scales, block: [1, inputs], factor: 1.0 / 127.0 };
    Ok(Quantized { shape: vec![outputs, inputs], numbers: Arc::new(scaled) })
}

fn four_bits<'a>(
    parts: &Parts<'a>,
    name: &str,
    codes: Tensor<'a>,
    state: &str,
) -> Result<Quantized<'a>, QuantizedError> {
    let part = |end: &str| format!("{name}.{end}");
    let state = parts.require(name, &part(state))?;
    let read: State = match state.bytes {
        bytes if bytes.len() <= MAX_STATE => serde_json::from_slice(bytes)
            .map_err(|error| QuantizedError::QuantState { tensor: state.name.to_owned(), error: error.to_string() })?,
        bytes => {
            let error = format!("it has {} bytes; the limit is {MAX_STATE}", bytes.len());
            return Err(QuantizedError::QuantState { tensor: state.name.to_owned(), error });
        }
    };
    let State { blocksize, shape, nested_blocksize, nested_offset } = read;
    let elements = shape[0].checked_mul(shape[1]).filter(|elements| elements.div_ceil(2) == codes.bytes.len());
    let Some(elements) = elements.filter(|elements| *elements > 0) else {
        return Err(shape_fault(&codes, format!("half a byte for each element of {shape:?}, as in {}", state.name)));
    };
    let blocks = elements.div_ceil(blocksize.get());
    let absmax = parts.require(name, &part("absmax"))?;
    expect_shape(&absmax, &[&[blocks]])?;
    let scales = match parts.find(&part("nested_absmax")) {
        None => {
            parts.expect_dtype(&absmax, &[Dtype::F32])?;
            AbsMax::Plain(absmax)
        }
        Some(scales) => {
            parts.expect_dtype(&absmax, &[Dtype::U8])?;
            parts.expect_dtype(&scales, &[Dtype::F32])?;
            let (Some(block), Some(offset)) = (nested_blocksize, nested_offset.filter(|offset| offset.is_finite()))
            else {
                let error = format!("nested_blocksize and nested_offset are required with {}", scales.name);
                return Err(QuantizedError::QuantState { tensor: state.name.to_owned(), error });
            };
            expect_shape(&scales, &[&[blocks.div_ceil(block.get())]])?;
            let table = Box::new(table(parts, parts.require(name, &part("nested_quant_map"))?)?);
            AbsMax::Nested { codes: absmax, table, scales, block: block.get(), offset }
        }
    };
    let table = table(parts, parts.require(name, &part("quant_map"))?)?;
    let lookup = Lookup { codes, high_first: true, table, scales, block: blocksize.get() };
    Ok(Quantized { shape: shape.to_vec(), numbers: Arc::new(lookup) })
}

/// Reads the table of values of the codes.
fn table<'a, const N: usize>(parts: &Parts<'a>, map: Tensor<'a>) -> Result<[f32; N], QuantizedError> {
    parts.expect_dtype(&map, &[Dtype::F32])?;
    expect_shape(&map, &[&[N]])?;
    let table = std::array::from_fn(|index| FloatDtype::F32.read(map.bytes, index));
    match table.iter().position(|value| !value.is_finite()) {
        Some(index) => Err(value_fault(&map, index, table[index], "finite")),
        None => Ok(table),
    }
}

impl BlockScales for AbsMax<'_> {
    fn at(&self, index: usize) -> f32 {
        match self {
            Self::Plain(scales) => FloatDtype::F32.read(scales.bytes, index),
            Self::Nested { codes, table, scales, block, offset } => {
                let scale = FloatDtype::F32.read(scales.bytes, index / block);
                table[usize::from(codes.bytes[index])] * scale + offset
            }
        }
    }

    fn parts(&self) -> Vec<Tensor<'_>> {
        match self {
            Self::Plain(scales) => vec![*scales],
            Self::Nested { codes, scales, .. } => vec![*codes, *scales],
        }
    }

    fn check(&self, _: Range<usize>) -> Result<(), QuantizedError> {
        let (Self::Plain(scales) | Self::Nested { scales, .. }) = self;
        let value = |index| FloatDtype::F32.read(scales.bytes, index);
        match (0..scales.elements()).find(|index| !value(*index).is_finite()) {
            Some(index) => Err(value_fault(scales, index, value(index), "finite")),
            None => Ok(()),
        }
    }
}
