//! 4-bit codes that index a table of values, with a scale per block of elements.

use std::fmt;
use std::ops::Range;

use super::dequantize::Dequantize;
use super::error::QuantizedError;
use crate::tensor::Tensor;

/// Codes in the order of the weight's elements, two per byte.
pub(super) struct Lookup<'a, S> {
    pub codes: Tensor<'a>,
    /// Whether the first code of a byte is in its high half.
    pub high_first: bool,
    /// Value of each code.
    pub table: [f32; 16],
    pub scales: S,
    /// Number of elements that share a scale.
    pub block: usize,
}

/// Scales of blocks.
pub(super) trait BlockScales: Send + Sync {
    fn at(&self, block: usize) -> f32;

    fn parts(&self) -> Vec<Tensor<'_>>;

    /// Checks the scales of these blocks, or of more.
    fn check(&self, blocks: Range<usize>) -> Result<(), QuantizedError>;
}

impl<S> fmt::Debug for Lookup<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lookup").field("codes", &self.codes.name).finish_non_exhaustive()
    }
}

impl<S> Lookup<'_, S> {
    /// Returns the code of an element.
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
