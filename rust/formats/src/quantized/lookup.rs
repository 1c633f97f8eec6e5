//! Codes of four bits that are looked up in a table, each number times the scale of its block of neighbours.

use std::fmt;
use std::ops::Range;

use super::dequantize::Dequantize;
use super::error::QuantizedError;
use crate::tensor::Tensor;

/// Codes in the order of the weight's elements, two in a byte.
pub(super) struct Lookup<'a, S> {
    pub codes: Tensor<'a>,
    /// Whether the first of a byte's two codes is in its high half.
    pub high_first: bool,
    /// What each code stands for.
    pub table: [f32; 16],
    pub scales: S,
    /// Elements that share a scale.
    pub block: usize,
}

/// The scales of blocks.
pub(super) trait BlockScales: Send + Sync {
    fn at(&self, block: usize) -> f32;

    fn parts(&self) -> Vec<Tensor<'_>>;

    /// Holds the scales of these blocks, or of more, against what they may be.
    fn check(&self, blocks: Range<usize>) -> Result<(), QuantizedError>;
}

impl<S> fmt::Debug for Lookup<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lookup").field("codes", &self.codes.name).finish_non_exhaustive()
    }
}

impl<S> Lookup<'_, S> {
    /// The code of an element.
    pub fn code(&self, index: usize) -> u8 {
        let byte = self.codes.bytes[index / 2];
        if index.is_multiple_of(2) == self.high_first { byte >> 4 } else { byte & 15 }
    }
}

impl<S: BlockScales> Dequantize for Lookup<'_, S> {
    fn parts(&self) -> Vec<Tensor<'_>> {
        let mut parts = self.scales.parts();
        parts.push(self.codes);
        parts
    }

    fn check(&self, elements: Range<usize>) -> Result<(), QuantizedError> {
        self.scales.check(elements.start / self.block..elements.end.div_ceil(self.block))
    }

    fn read(&self, first: usize, mut out: &mut [f32]) {
        let mut at = first;
        while !out.is_empty() {
            let run = out.len().min((at / self.block + 1) * self.block - at);
            let (now, rest) = out.split_at_mut(run);
            let scale = self.scales.at(at / self.block);
            for (index, value) in now.iter_mut().enumerate() {
                *value = self.table[usize::from(self.code(at + index))] * scale;
            }
            (out, at) = (rest, at + run);
        }
    }
}
