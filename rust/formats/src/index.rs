//! `model.safetensors.index.json`: which file of a sharded checkpoint holds which tensor.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use serde::Deserialize;

use crate::error::{CheckpointError, Fault};
use crate::folder::{Folder, open_file};
use crate::safetensors::LFS_POINTER;
use crate::unique::UniqueMap;

pub(crate) const INDEX_NAME: &str = "model.safetensors.index.json";

/// That of a safetensors header, for which an index stands in.
const MAX_INDEX: u64 = 100_000_000;

#[derive(Deserialize)]
struct RawIndex {
    weight_map: UniqueMap<String>,
}

/// Reads the index: for each shard's name the tensors that it holds.
///
/// Every name is checked to be a plain file name before any of the files is looked at.
pub(crate) fn read_index(path: &Path) -> Result<BTreeMap<String, Vec<String>>, CheckpointError> {
    read_weight_map(path).map_err(|fault| fault.of(path))
}

fn read_weight_map(path: &Path) -> Result<BTreeMap<String, Vec<String>>, Fault> {
    let (mut file, bytes) = open_file(path)?;
    if bytes > MAX_INDEX {
        return Err(Fault::IndexTooLong { bytes, limit: MAX_INDEX });
    }
    if bytes == 0 {
        return Err(Fault::Empty);
    }
    let mut text = Vec::new();
    file.by_ref().take(MAX_INDEX).read_to_end(&mut text)?;
    if text.starts_with(LFS_POINTER) {
        return Err(Fault::LfsPointer { bytes });
    }
    let index: RawIndex = serde_json::from_slice(&text).map_err(Fault::IndexMalformed)?;
    let mut shards: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (tensor, shard) in index.weight_map.0 {
        if !Folder::is_plain_name(&shard) {
            return Err(Fault::ShardName { tensor, shard });
        }
        shards.entry(shard).or_default().push(tensor);
    }
    if shards.is_empty() {
        return Err(Fault::IndexEmpty);
    }
    Ok(shards)
}
