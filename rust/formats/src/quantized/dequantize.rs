//! [`Dequantize`]: reading the values of a quantized weight from its tensors.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::error::QuantizedError;
use crate::blocks::BlockLayout;
use crate::tensor::Tensor;

/// A quantized weight that is stored as several tensors. Outputs always come before inputs.
#[derive(Debug, Clone)]
pub(crate) struct Quantized<'a> {
    /// `[outputs, inputs]`, or a stack: `[experts, outputs, inputs]`.
    pub shape: Vec<usize>,
    pub numbers: Arc<dyn Dequantize + 'a>,
}

/// Reads the values of a quantized weight from its tensors. Elements are counted in row-major order.
pub(crate) trait Dequantize: fmt::Debug + Send + Sync {
    /// Returns the stored tensors.
    fn parts(&self) -> Vec<Tensor<'_>>;

    /// Checks the scales and zero points of these elements, or of more.
    fn check(&self, elements: Range<usize>) -> Result<(), QuantizedError>;

    /// Fills `out` with elements from `first` on.
    fn read(&self, first: usize, out: &mut [f32]);

    /// Returns the layout of blocks that represent the same values exactly, if there is one.
    fn blocks(&self) -> Option<BlockLayout> {
        None
    }

    /// Fills `out` with blocks, starting with the block of element `first`.
    fn read_blocks(&self, first: usize, out: &mut [u8]) {
        unreachable!("there are no blocks (element {first}, {} bytes)", out.len());
    }
}
