//! Features of images, as Python passes them.

use ferrule_model::Features;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

use crate::errors;

/// Features of consecutive tokens: the position of the first one, the number of tokens, and float32 `[tokens, width]`.
#[derive(FromPyObject)]
pub(crate) struct FeatureRows(usize, usize, PyBackedBytes);

impl FeatureRows {
    /// Reads the features.
    pub(crate) fn read(&self) -> PyResult<Features> {
        rows(self.0, self.1, &self.2)
    }
}

/// Reads the features of `tokens` tokens from position `first` on.
pub(crate) fn rows(first: usize, tokens: usize, bytes: &[u8]) -> PyResult<Features> {
    let (floats, rest) = bytes.as_chunks();
    if tokens == 0 || floats.is_empty() || !rest.is_empty() || !floats.len().is_multiple_of(tokens) {
        let found = bytes.len();
        return Err(errors::PromptError::new_err(format!(
            "features of {tokens} tokens must be rows of float32, got {found} bytes"
        )));
    }
    let rows = floats.iter().map(|float| f32::from_le_bytes(*float)).collect();
    Ok(Features::new(first, rows, floats.len() / tokens))
}
