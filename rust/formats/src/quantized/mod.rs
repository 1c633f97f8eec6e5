//! Weights that a checkpoint stores in fewer bits, each as several tensors: codes, and what turns codes into numbers.
//!
//! A method is a file here: how its tensors are called, what they must be, and how they lie. The shapes and types of a
//! weight's tensors are held against each other when it is asked for, the numbers in them by
//! [`check`](crate::WeightTensor::check) before it is read.

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
