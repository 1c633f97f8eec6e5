//! `model.safetensors.index.json`: the shard of each tensor in a sharded checkpoint.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use serde::Deserialize;

use crate::file::{FileError, LFS_POINTER, open_file};
use crate::folder::Folder;
use crate::unique::UniqueMap;

pub(crate) const INDEX_NAME: &str = "model.safetensors.index.json";

/// Maximum size of an index in bytes; the same limit as for a safetensors header.
const MAX_INDEX: u64 = 100_000_000;

/// The index of a sharded checkpoint is wrong.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum IndexError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("is {bytes} bytes long; the limit for an index is {limit}")]
    TooLong { bytes: u64, limit: u64 },
    #[error("is not a valid index: {0}")]
    Malformed(serde_json::Error),
    #[error("weight_map is empty")]
    NoTensors,
    #[error("weight_map puts tensor {tensor:?} into {shard:?}, which is not a plain file name: refused")]
    ShardName { tensor: String, shard: String },
}

#[derive(Deserialize)]
struct RawIndex {
    weight_map: UniqueMap<String>,
}

/// Reads the index and returns the tensor names of each shard.
///
/// Checks that every shard has a plain file name, before any of the files is opened.
pub(crate) fn read_index(path: &Path) -> Result<BTreeMap<String, Vec<String>>, IndexError> {
    let (mut file, bytes) = open_file(path)?;
    if bytes > MAX_INDEX {
        return Err(IndexError::TooLong { bytes, limit: MAX_INDEX });
    }
    if bytes == 0 {
        return Err(FileError::Empty.into());
    }
    let mut text = Vec::new();
    file.by_ref().take(MAX_INDEX).read_to_end(&mut text).map_err(FileError::from)?;
    if text.starts_with(LFS_POINTER) {
        return Err(FileError::LfsPointer { bytes }.into());
    }
    let index: RawIndex = serde_json::from_slice(&text).map_err(IndexError::Malformed)?;
    let mut shards: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (tensor, shard) in index.weight_map.0 {
        if !Folder::is_plain_name(&shard) {
            return Err(IndexError::ShardName { tensor, shard });
        }
        shards.entry(shard).or_default().push(tensor);
    }
    if shards.is_empty() {
        return Err(IndexError::NoTensors);
    }
    Ok(shards)
}
