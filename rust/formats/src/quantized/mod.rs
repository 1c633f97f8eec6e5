//! Weights that a checkpoint stores in fewer bits, each as several tensors: codes, and what turns codes into numbers.
//!
//! A method is a file here: how its tensors are called, what they must be, and how they lie. The shapes and types of a
//! weight's tensors are held against each other when it is asked for, the numbers in them by
//! [`check`](crate::WeightTensor::check) before it is read.

mod awq;
mod bitsandbytes;
mod compressed_tensors;
mod float8;
mod fp8;
mod gptq;
mod grid;
mod grouped;
mod lookup;
mod mxfp4;
mod parts;
mod scaled;
mod streams;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::blocks::BlockLayout;
use crate::checkpoint::Checkpoint;
use crate::error::Fault;
use crate::tensor::Tensor;

pub use awq::Awq;
pub use bitsandbytes::{BitsAndBytes, BitsAndBytesCodes};
pub use compressed_tensors::{CompressedBits, CompressedKind, CompressedTensors, CompressedWeights};
pub use fp8::Fp8;
pub use gptq::{Gptq, GptqBits};
pub use mxfp4::Mxfp4;

use parts::Parts;

/// How a checkpoint stores those of its weights that are not plain floating-point numbers: its `quantization_config`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(tag = "method")]
#[allow(missing_docs, reason = "each is documented where it is")]
pub enum StoredAs {
    #[serde(rename = "gptq")]
    Gptq(Gptq),
    #[serde(rename = "awq")]
    Awq(Awq),
    #[serde(rename = "compressed-tensors")]
    CompressedTensors(CompressedTensors),
    #[serde(rename = "fp8")]
    Fp8(Fp8),
    #[serde(rename = "bitsandbytes")]
    BitsAndBytes(BitsAndBytes),
    #[serde(rename = "mxfp4")]
    Mxfp4(Mxfp4),
}

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
    fn check(&self, elements: Range<usize>) -> Result<(), Fault>;

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

impl StoredAs {
    /// The method, as messages call it.
    fn name(&self) -> &'static str {
        match self {
            Self::Gptq(_) => "GPTQ",
            Self::Awq(_) => "AWQ",
            Self::CompressedTensors(_) => "compressed-tensors",
            Self::Fp8(_) => "FP8",
            Self::BitsAndBytes(_) => "bitsandbytes",
            Self::Mxfp4(_) => "MXFP4",
        }
    }

    /// Whether there are tensors under other names that a weight of that name is made of.
    pub(crate) fn has(&self, checkpoint: &Checkpoint, name: &str) -> bool {
        let ends: &[&str] = match self {
            Self::Gptq(_) => gptq::PARTS,
            Self::Awq(_) => awq::PARTS,
            Self::CompressedTensors(_) => compressed_tensors::PARTS,
            Self::Mxfp4(_) => {
                return mxfp4::PARTS.iter().any(|end| checkpoint.has_tensor(&format!("{name}{end}")));
            }
            Self::Fp8(_) | Self::BitsAndBytes(_) => return false,
        };
        name.strip_suffix(".weight")
            .is_some_and(|module| ends.iter().any(|end| checkpoint.has_tensor(&format!("{module}.{end}"))))
    }

    /// The weight of that name, if it is stored in this way and not plainly.
    pub(crate) fn weight<'a>(&self, checkpoint: &'a Checkpoint, name: &str) -> Result<Option<Quantized<'a>>, Fault> {
        let parts = Parts { checkpoint, method: self.name() };
        match self {
            Self::Gptq(gptq) => gptq.weight(&parts, name),
            Self::Awq(awq) => awq.weight(&parts, name),
            Self::CompressedTensors(compressed) => compressed.weight(&parts, name),
            Self::Fp8(fp8) => fp8.weight(&parts, name),
            Self::BitsAndBytes(bits) => bits.weight(&parts, name),
            Self::Mxfp4(mxfp4) => mxfp4.weight(&parts, name),
        }
    }
}
