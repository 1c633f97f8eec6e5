//! GGUF, the files of llama.cpp: metadata and tensors in one file, or in several parts.
//!
//! The reader is our own, since the files are hostile. It takes the bytes of a mapped file: `header` reads and checks
//! what it says of its tensors, `value` the metadata, `parts` finds the files of a model, and `types` knows what the
//! bytes of a tensor mean.

mod cursor;
mod fault;
mod header;
mod parts;
mod types;
mod value;

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use crate::checkpoint::Checkpoint;
use crate::error::CheckpointError;

pub use fault::GgufFault;
pub(crate) use header::Header;
pub use types::{BlockType, TensorType};
pub use value::{Array, Value, ValueType};

/// The bytes that each file begins with.
const MAGIC: &[u8] = b"GGUF";

/// A model's GGUF file, or all of its parts: metadata and tensors.
#[derive(Debug)]
pub struct GgufFile {
    checkpoint: Checkpoint,
    paths: Vec<PathBuf>,
    /// That of the first part, whose metadata are the model's.
    header: Header,
}

impl GgufFile {
    /// Whether a file begins as GGUF does.
    pub fn is_one(path: &Path) -> bool {
        let mut magic = [0; MAGIC.len()];
        File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && magic == MAGIC
    }

    /// Opens a file; of a model in several, any one, and with it the others beside it.
    ///
    /// Reads and checks the headers alone; takes memory for a table of the keys and the tensors.
    ///
    /// # Errors
    /// [`CheckpointError`] for whatever is missing or malformed, or a part that lies outside of the folder.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let parts = parts::open(path)?;
        let paths: Vec<_> = parts.iter().map(|part| part.path.clone()).collect();
        let (checkpoint, header) = parts::join(parts)?;
        Ok(Self { checkpoint, paths, header })
    }

    /// The files, in their order.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// The keys of the metadata, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.header.keys.keys().map(String::as_str)
    }

    /// The value of a key of the metadata, if it is there.
    ///
    /// # Errors
    /// A [`GgufFault`] where the file has been changed since it was opened.
    pub fn value(&self, key: &str) -> Result<Option<Value<'_>>, CheckpointError> {
        let file = self.checkpoint.shard(0);
        self.header.value(file, key).map_err(|fault| self.changed(fault))
    }

    /// The error of a value of the metadata that could be read when the file was opened.
    pub fn changed(&self, fault: GgufFault) -> CheckpointError {
        crate::error::Fault::from(fault).of(self.checkpoint.listing())
    }

    /// The tensors.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// The tensors, without the metadata.
    pub fn into_checkpoint(self) -> Checkpoint {
        self.checkpoint
    }
}
