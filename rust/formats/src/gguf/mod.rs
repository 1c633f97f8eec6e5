//! GGUF, the file format of llama.cpp: metadata and tensors in one file.
//!
//! The reader is written here because the files are hostile. It works on the bytes of a mapped file: `header` reads and
//! checks the tensor table, `value` the metadata, and `types` dequantizes the blocks that tensors consist of.

mod cursor;
mod error;
mod header;
mod types;
mod value;

pub use error::GgufError;
pub(crate) use header::{Header, MAGIC, TensorInfo};
pub use types::{BlockType, TensorType};
pub use value::{Array, Value, ValueType};
