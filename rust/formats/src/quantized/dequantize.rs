//! [`Dequantize`]: how the numbers of a quantized weight are read from its tensors.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::error::QuantizedError;
use crate::blocks::BlockLayout;
use crate::tensor::Tensor;

/// A weight that is made of several tensors. Whatever module it is of, outputs come before inputs.
#[derive(Debug, Clone)]
pub(crate) struct Quantized<'a> {
    /// `[outputs, inputs]`, or several of them: `[experts, outputs, inputs]`.
    pub shape: Vec<usize>,
    pub numbers: Arc<dyn Dequantize + 'a>,
}

/// How the numbers of a weight come out of its tensors. Elements are counted in row-major order.
pub(crate) trait Dequantize: fmt::Debug + Send + Sync {
    /// The tensors.
    fn parts(&self) -> Vec<Tensor<'_>>;

    /// Holds the numbers behind these elements, or more, against what they may be.
    fn check(&self, elements: Range<usize>) -> Result<(), QuantizedError>;

    /// Writes as many elements as `out` holds, from `first` on.
    fn read(&self, first: usize, out: &mut [f32]);

    /// The layout of blocks in which the same numbers can be had, to the last bit.
    fn blocks(&self) -> Option<BlockLayout> {
        None
    }

    /// Writes as many blocks as `out` holds, from the one of element `first` on.
    fn read_blocks(&self, first: usize, out: &mut [u8]) {
        unreachable!("there are no blocks (element {first}, {} bytes)", out.len());
    }
}
