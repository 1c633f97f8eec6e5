//! FP8 with scales, as DeepSeek, Qwen, AutoFP8 and fbgemm save it.
//!
//! Tensors of a module: `weight` F8_E4M3 or F8_E5M2 `[outputs, inputs]`, and `weight_scale_inv` (a factor, despite its
//! name) or `weight_scale`: one per tensor, per output, or per block. DeepSeek-V4's own files have `scale` in place of
//! `weight_scale`, and matrices of MXFP4 beside those of FP8: `weight` I8 `[outputs, inputs / 2]`, two codes per byte, the
//! first in the low half, and `scale` F8_E8M0 `[outputs, inputs / 32]`.

use std::num::NonZeroUsize;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::dequantize::Quantized;
use super::error::QuantizedError;
use super::float8::{FLOATS, numbers};
use super::grid::Grid;
use super::mxfp4;
use super::parts::{Parts, expect_shape, shape_fault};
use super::scaled::Scaled;
use crate::dtype::Dtype;
use crate::tensor::Tensor;

/// FP8 quantization.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Fp8 {
    /// Outputs and inputs that share a scale; `None` for one scale per tensor or per row.
    pub block: Option<[NonZeroUsize; 2]>,
}

impl Fp8 {
    pub(super) fn weight<'a>(&self, parts: &Parts<'a>, name: &str) -> Result<Option<Quantized<'a>>, QuantizedError> {
        let Some(codes) = parts.find(name) else { return Ok(None) };
        let beside = name.strip_suffix(".weight").and_then(|module| parts.find(&format!("{module}.scale")));
        if let (Dtype::I8, Some(scales)) = (codes.dtype, beside) {
            return mxfp4::rows(parts, codes, scales).map(Some);
        }
        if !FLOATS.contains(&codes.dtype) {
            return Ok(None);
        }
        let inverse = format!("{name}_scale_inv");
        let found = parts.find(&inverse).or_else(|| parts.find(&format!("{name}_scale"))).or(beside);
        let scales = match found {
            Some(scales) => scales,
            None => parts.require(name, &inverse)?,
        };
        scaled(parts, codes, scales, self.block).map(Some)
    }
}

/// Returns a matrix of 8-bit codes; the shape of the scales determines what each covers.
pub(super) fn scaled<'a>(
    parts: &Parts<'a>,
    codes: Tensor<'a>,
    scales: Tensor<'a>,
    block: Option<[NonZeroUsize; 2]>,
) -> Result<Quantized<'a>, QuantizedError> {
    let [outputs, inputs] = parts.expect_matrix(&codes)?;
    let Some(numbers) = numbers(codes.dtype).filter(|_| outputs > 0 && inputs > 0) else {
        return Err(shape_fault(&codes, "[outputs, inputs], both > 0".to_owned()));
    };
    let (scales, block) = scale_grid(parts, scales, [outputs, inputs], block)?;
    let scaled = Scaled { codes, inputs, numbers, scales, block, factor: 1.0 };
    Ok(Quantized { shape: vec![outputs, inputs], numbers: Arc::new(scaled) })
}

/// Returns the scales of a matrix `[outputs, inputs]`, and the outputs and inputs that share one. Without a block, the shape
/// determines what each covers.
pub(super) fn scale_grid<'a>(
    parts: &Parts<'a>,
    scales: Tensor<'a>,
    [outputs, inputs]: [usize; 2],
    block: Option<[NonZeroUsize; 2]>,
) -> Result<(Grid<'a>, [usize; 2]), QuantizedError> {
    let (block, strides) = match block {
        Some(block) => {
            let block = block.map(NonZeroUsize::get);
            let grid = [outputs.div_ceil(block[0]), inputs.div_ceil(block[1])];
            expect_shape(&scales, &[&grid])?;
            (block, [grid[1], 1])
        }
        None => {
            expect_shape(&scales, &[&[outputs, 1], &[outputs], &[1], &[1, 1], &[]])?;
            ([1, inputs], [usize::from(scales.elements() == outputs), 0])
        }
    };
    Ok((Grid::new(parts, scales, strides)?, block))
}
