//! Readers of model files, from bytes to typed tensors.
//!
//! Files are untrusted. Every number in a header is checked against the bytes in the file before memory is allocated for
//! it or an offset is followed. A violation is a [`CheckpointError`] with the path of the file and the numbers. Tensors
//! are views of the mapped file; nothing is copied until a caller reads values.
//!
//! No check can protect against another program that truncates a file while it is mapped: reading the missing pages ends
//! the process (SIGBUS), as in every program that maps files.

mod blocks;
mod checkpoint;
mod checksums;
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
mod table;
mod tensor;
mod tokenizer_json;
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
pub use table::{RowFormat, StoredTable};
pub use tensor::Tensor;
pub use tokenizer_json::{CharsmapError, TokenizerJsonError, check_charsmap, check_tokenizer_json};
pub use weight::WeightTensor;
