//! The files of a model, as its spec describes them.

use std::path::Path;

use ferrule_formats::{Checkpoint, CheckpointError};
use ferrule_model::ModelSpec;

/// Opens a directory, with the folders within it that the spec names, or a GGUF file.
///
/// # Errors
/// As [`Checkpoint::open`].
pub(crate) fn open(path: &str, spec: &ModelSpec) -> Result<Checkpoint, CheckpointError> {
    let mut checkpoint = Checkpoint::open(Path::new(path))?.stored_as(spec.stored_as.clone());
    spec.folders().into_iter().try_for_each(|folder| checkpoint.add_folder(folder))?;
    Ok(checkpoint)
}
