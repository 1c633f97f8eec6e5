//! Model files: bytes in, typed tensors out.
//!
//! Files are hostile. Whatever a header claims is checked against the bytes that are there before any memory is
//! reserved for it or any offset is followed, and a violation is a [`CheckpointError`] that names the file and states
//! the fact with its numbers. Tensors are views of the mapped file; nothing is copied until a caller asks for floats.
//!
//! One fault survives no check: another program that truncates a file while it is mapped. Touching the missing pages
//! then ends the process (SIGBUS); it holds for every program that maps files.

mod blocks;
mod checkpoint;
mod dtype;
mod error;
mod file;
mod folder;
#[cfg(test)]
mod fuzz;
pub mod gguf;
mod gguf_file;
mod index;
mod nearest;
mod open;
mod packed;
mod quantized;
mod safetensors;
mod tensor;
mod unique;
mod weight;

pub use blocks::BlockLayout;
pub use checkpoint::Checkpoint;
pub use dtype::{Dtype, FloatDtype};
pub use error::{CheckpointError, CheckpointErrorKind};
pub use file::FileError;
pub use gguf_file::GgufFile;
pub use index::IndexError;
pub use nearest::nearest;
pub use packed::{PackedError, PackedErrorKind, PackedFile, PackedTensor, PackedWriter};
pub use quantized::{
    Awq, BitsAndBytes, BitsAndBytesCodes, CompressedBits, CompressedKind, CompressedTensors, CompressedWeights, Fp8,
    Gptq, GptqBits, Mxfp4, QuantizedError, StoredAs,
};
pub use safetensors::SafetensorsError;
pub use tensor::Tensor;
pub use weight::WeightTensor;
