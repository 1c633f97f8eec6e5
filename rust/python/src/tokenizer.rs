//! Limits of tokenizer files.

use ferrule_formats::{check_charsmap, check_tokenizer_json};
use pyo3::prelude::*;

use crate::errors::TokenizerError;

/// Checks the limits of a tokenizer.json.
#[pyfunction]
#[pyo3(name = "check_tokenizer_json")]
pub(crate) fn check_json(py: Python<'_>, content: &[u8]) -> PyResult<()> {
    py.detach(|| check_tokenizer_json(content)).map_err(|error| TokenizerError::new_err(error.to_string()))
}

/// Checks the header of a SentencePiece character map.
#[pyfunction]
#[pyo3(name = "check_charsmap")]
pub(crate) fn check_map(charsmap: &[u8]) -> PyResult<()> {
    check_charsmap(charsmap).map_err(|error| TokenizerError::new_err(error.to_string()))
}
