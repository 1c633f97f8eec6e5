//! Quantized weights of checkpoints, each stored as several tensors: codes, scales and zero points.
//!
//! Each method has a file: the names, types and shapes of its tensors and their layout. Shapes and types are checked
//! when a weight is looked up, values by [`check`](crate::WeightTensor::check) before it is read.

mod awq;
mod bitsandbytes;
mod compressed_tensors;
mod dequantize;
mod error;
mod float8;
mod fp8;
mod gptq;
mod grid;
mod grouped;
mod lookup;
mod masked;
mod method;
mod mxfp4;
mod parts;
mod scaled;
mod streams;

pub use awq::Awq;
pub use bitsandbytes::{BitsAndBytes, BitsAndBytesCodes};
pub use compressed_tensors::{CompressedBits, CompressedKind, CompressedTensors, CompressedWeights};
pub(crate) use dequantize::Quantized;
pub use error::QuantizedError;
pub use fp8::Fp8;
pub use gptq::{Gptq, GptqBits};
pub use method::StoredAs;
pub use mxfp4::Mxfp4;
