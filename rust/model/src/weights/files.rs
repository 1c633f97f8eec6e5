//! Open files of weights: a checkpoint, a packed file, or none.

use std::collections::BTreeMap;
use std::path::Path;

use ferrule_formats::{Checkpoint, GgufFile, PackedFile};

use super::{LoadError, Source, open_packed};
use crate::spec::ModelSpec;

/// Number and bytes of the tensors of each stored type.
pub type StoredTypes = BTreeMap<&'static str, (usize, u64)>;

/// Open files of a model's weights.
pub enum WeightFiles {
    /// No files: the weights are random.
    Random,
    /// A checkpoint: safetensors files of a directory, or a GGUF file.
    Checkpoint(Checkpoint),
    /// A packed file.
    Packed(PackedFile),
}

impl WeightFiles {
    /// Opens the checkpoint of a directory, with the folders that the spec names, a GGUF file, or a packed file; a
    /// packed file is mapped if `mapped`, else read into memory.
    ///
    /// # Errors
    /// [`LoadError`] for files that cannot be read or do not fit the spec.
    pub fn open(path: Option<&Path>, spec: &ModelSpec, mapped: bool) -> Result<Self, LoadError> {
        let Some(path) = path else { return Ok(Self::Random) };
        if path.is_file() && !GgufFile::is_gguf(path) {
            return Ok(Self::Packed(open_packed(path, mapped)?));
        }
        let mut checkpoint = Checkpoint::open(path)?.stored_as(spec.stored_as.clone());
        spec.folders().into_iter().try_for_each(|folder| checkpoint.add_folder(folder))?;
        Ok(Self::Checkpoint(checkpoint))
    }

    /// Returns the source of the weights; those of a packed file may exceed the memory if `may_page`.
    #[must_use]
    pub fn source(&self, may_page: bool) -> Source<'_> {
        match self {
            Self::Random => Source::Random,
            Self::Checkpoint(checkpoint) => Source::Checkpoint(checkpoint),
            Self::Packed(file) => Source::Packed { file, may_page },
        }
    }

    /// Returns the bytes of all tensors, and for a checkpoint the number and bytes of each stored type; `None` without
    /// files.
    #[must_use]
    pub fn stored(&self) -> Option<(u64, StoredTypes)> {
        match self {
            Self::Random => None,
            Self::Checkpoint(checkpoint) => Some((checkpoint.total_bytes(), checkpoint.stored())),
            Self::Packed(file) => Some((file.total_bytes(), BTreeMap::new())),
        }
    }
}
