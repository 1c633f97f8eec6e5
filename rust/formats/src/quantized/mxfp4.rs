//! MXFP4 (OCP MX 1.0), as OpenAI saved the experts of gpt-oss.
//!
//! Tensors of a weight `x`: `x_blocks` U8 `[..., outputs, inputs / 32, 16]`, two codes per byte, the first in the low
//! half, and `x_scales` U8 `[..., outputs, inputs / 32]`, powers of two.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::dequantize::{Dequantize, Quantized};
use super::error::QuantizedError;
use super::grid::power_of_two;
use super::lookup::{BlockScales, Lookup};
use super::parts::{Parts, expect_shape, shape_fault, value_fault};
use crate::blocks::BlockLayout;
use crate::dtype::Dtype;
use crate::tensor::Tensor;

/// Suffixes that replace a plain tensor's name.
pub(super) const PARTS: &[&str] = &["_blocks", "_scales"];
/// Number of codes that share a scale.
const BLOCK: usize = 32;
/// Values of the codes: one sign bit, two bits of exponent, one of mantissa.
const NUMBERS: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
/// Largest scale with which the value 6 is finite.
const MAX_SCALE: u8 = 252;

/// MXFP4 quantization.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Mxfp4 {}

/// Exponents of blocks.
struct Exponents<'a>(Tensor<'a>);

/// Consecutive blocks of codes with their scales.
#[derive(Debug)]
struct Blocks<'a>(Lookup<'a, Exponents<'a>>);

impl Mxfp4 {
    pub(super) fn weight<'a>(&self, parts: &Parts<'a>, name: &str) -> Result<Option<Quantized<'a>>, QuantizedError> {
        let [blocks, scales] = [PARTS[0], PARTS[1]].map(|end| format!("{name}{end}"));
        if parts.find(name).is_some() || [&blocks, &scales].iter().all(|part| parts.find(part).is_none()) {
            return Ok(None);
        }
        let (blocks, scales) = (parts.require(name, &blocks)?, parts.require(name, &scales)?);
        parts.expect_dtype(&blocks, &[Dtype::U8])?;
        parts.expect_dtype(&scales, &[Dtype::U8, Dtype::F8E8M0])?;
        let split =
            blocks.shape.split_last_chunk::<1>().filter(|(outer, _)| outer.len() > 1 && !blocks.bytes.is_empty());
        let Some((outer @ [.., count], [16])) = split else {
            return Err(shape_fault(&blocks, "[..., outputs, inputs / 32, 16]".to_owned()));
        };
        expect_shape(&scales, &[outer])?;
        let mut shape = outer.to_vec();
        shape.pop();
        shape.push(count * BLOCK);
        Ok(Some(quantized(shape, blocks, scales)))
    }
}

/// Returns a matrix whose codes, two per byte, and scales are stored in rows.
pub(super) fn rows<'a>(
    parts: &Parts<'a>,
    codes: Tensor<'a>,
    scales: Tensor<'a>,
) -> Result<Quantized<'a>, QuantizedError> {
    let [outputs, pairs] = parts.expect_matrix(&codes)?;
    if outputs == 0 || pairs == 0 || !pairs.is_multiple_of(BLOCK / 2) {
        return Err(shape_fault(&codes, format!("[outputs, a multiple of {}], both > 0", BLOCK / 2)));
    }
    parts.expect_dtype(&scales, &[Dtype::F8E8M0, Dtype::U8])?;
    expect_shape(&scales, &[&[outputs, pairs / (BLOCK / 2)]])?;
    Ok(quantized(vec![outputs, 2 * pairs], codes, scales))
}

fn quantized<'a>(shape: Vec<usize>, codes: Tensor<'a>, scales: Tensor<'a>) -> Quantized<'a> {
    let scales = Exponents(scales);
    let lookup = Lookup { codes, high_first: false, table: NUMBERS, scales, block: BLOCK };
    Quantized { shape, numbers: Arc::new(Blocks(lookup)) }
}

impl BlockScales for Exponents<'_> {
    fn at(&self, block: usize) -> f32 {
        power_of_two(self.0.bytes[block])
    }

    fn parts(&self) -> Vec<Tensor<'_>> {
        vec![self.0]
    }

    /// Checks only these blocks: the experts of a layer share one tensor, and each is checked on its own.
    fn check(&self, blocks: Range<usize>) -> Result<(), QuantizedError> {
        let first = blocks.start;
        match self.0.bytes[blocks].iter().position(|exponent| *exponent > MAX_SCALE) {
            Some(index) => {
                let index = first + index;
                Err(value_fault(&self.0, index, self.0.bytes[index], format!("at most {MAX_SCALE}")))
            }
            None => Ok(()),
        }
    }
}

impl Dequantize for Blocks<'_> {
    fn parts(&self) -> Vec<Tensor<'_>> {
        self.0.parts()
    }

    fn check(&self, elements: Range<usize>) -> Result<(), QuantizedError> {
        self.0.check(elements)
    }

    fn read(&self, first: usize, out: &mut [f32]) {
        self.0.read(first, out);
    }

    fn blocks(&self) -> Option<BlockLayout> {
        Some(BlockLayout::Mxfp4)
    }

    fn read_blocks(&self, first: usize, out: &mut [u8]) {
        let bytes = BlockLayout::Mxfp4.bytes();
        assert!(first.is_multiple_of(BLOCK) && out.len().is_multiple_of(bytes), "whole blocks");
        for (index, out) in out.chunks_exact_mut(bytes).enumerate() {
            let at = first + index * BLOCK;
            out[0] = self.0.scales.0.bytes[at / BLOCK];
            // ggml's order: the first half of the codes in the low halves of the bytes, the second half in the high
            // ones.
            for (i, byte) in out[1..].iter_mut().enumerate() {
                *byte = self.0.code(at + i) | self.0.code(at + BLOCK / 2 + i) << 4;
            }
        }
    }
}
