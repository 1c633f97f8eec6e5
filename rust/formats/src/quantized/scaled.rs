//! 8-bit codes with a scale per tensor, row or block.

use std::ops::Range;

use super::dequantize::Dequantize;
use super::error::QuantizedError;
use super::grid::Grid;
use crate::tensor::Tensor;

/// A matrix of 8-bit codes.
#[derive(Debug)]
pub(super) struct Scaled<'a> {
    /// `[outputs, inputs]`
    pub codes: Tensor<'a>,
    pub inputs: usize,
    /// Value of each code.
    pub numbers: &'static [f32; 256],
    /// Scales by block of `block[0]` outputs and `block[1]` inputs.
    pub scales: Grid<'a>,
    pub block: [usize; 2],
    /// Factor on every scale.
    pub factor: f32,
}

impl Dequantize for Scaled<'_> {
    fn parts(&self) -> Vec<Tensor<'_>> {
        vec![self.codes, self.scales.tensor()]
    }

    fn check(&self, _: Range<usize>) -> Result<(), QuantizedError> {
        self.scales.check()
    }

    fn read(&self, first: usize, mut out: &mut [f32]) {
        let [block_rows, block_columns] = self.block;
        let mut codes = &self.codes.bytes[first..][..out.len()];
        let (mut row, mut column) = (first / self.inputs, first % self.inputs);
        while !out.is_empty() {
            let end = self.inputs.min((column / block_columns + 1) * block_columns);
            let run = out.len().min(end - column);
            let scale = self.scales.at(row / block_rows, column / block_columns) * self.factor;
            let (now, rest) = out.split_at_mut(run);
            for (value, code) in now.iter_mut().zip(codes) {
                *value = self.numbers[usize::from(*code)] * scale;
            }
            (out, codes, column) = (rest, &codes[run..], column + run);
            if column == self.inputs {
                (row, column) = (row + 1, 0);
            }
        }
    }
}
