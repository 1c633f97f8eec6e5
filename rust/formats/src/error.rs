//! [`CheckpointError`]: the errors of all readers, joined with the path of the file.

use std::path::{Path, PathBuf};

use crate::dtype::Dtype;
use crate::file::FileError;
use crate::gguf::GgufError;
use crate::index::IndexError;
use crate::nearest::suggestion;
use crate::quantized::QuantizedError;
use crate::safetensors::SafetensorsError;

/// A file of a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{}: {kind}", file.display())]
pub struct CheckpointError {
    /// Path of the file or folder.
    pub file: PathBuf,
    /// Kind of the error.
    pub kind: Box<CheckpointErrorKind>,
}

/// Kinds of errors in a file of a checkpoint.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum CheckpointErrorKind {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Index(#[from] IndexError),
    #[error(transparent)]
    Safetensors(#[from] SafetensorsError),
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error(transparent)]
    Quantized(#[from] QuantizedError),

    // The files of a folder.
    #[error(
        "has neither model.safetensors nor model.safetensors.index.json (safetensors files there: {})",
        listed(others)
    )]
    NoWeights { others: Vec<String> },
    #[error("has no {name} (safetensors files there: {})", listed(others))]
    NoFile { name: String, others: Vec<String> },
    #[error(
        "has only pickle files ({}). Reading a pickle can run arbitrary code, so ferrule does not: \
         convert the model to safetensors or use a repository that has safetensors files",
        listed(files)
    )]
    PickleOnly { files: Vec<String> },
    #[error("is not a subfolder of the model")]
    NotAFolder,
    #[error("weight_map puts tensor {tensor:?} into {shard:?}, which does not exist: download the missing file")]
    ShardMissing { tensor: String, shard: String },
    #[error("has no tensor {tensor:?}, which {index} assigns to it: download the file again")]
    ShardLacks { tensor: String, index: String },

    // A tensor that a caller asked for.
    #[error("has no tensor {tensor:?}{}", suggestion(nearest.as_deref()))]
    NoTensor { tensor: String, nearest: Option<String> },
    #[error("tensor {tensor:?} must have dtype F32, F16 or BF16 to be a weight, got {dtype}")]
    NotFloat { tensor: String, dtype: Dtype },
}

/// Adds the path of the file to a reader's error.
pub(crate) trait InFile<T> {
    /// Returns the value, or a [`CheckpointError`] that names `file`.
    fn in_file(self, file: &Path) -> Result<T, CheckpointError>;
}

impl<T, E: Into<CheckpointErrorKind>> InFile<T> for Result<T, E> {
    fn in_file(self, file: &Path) -> Result<T, CheckpointError> {
        self.map_err(|error| CheckpointError { file: file.to_owned(), kind: Box::new(error.into()) })
    }
}

fn listed(files: &[String]) -> String {
    if files.is_empty() { "none".to_owned() } else { files.join(", ") }
}
