//! Packed files.

use std::collections::BTreeMap;
use std::path::Path;

use ferrule_model::open_packed;
use pyo3::prelude::*;
use serde_json::json;

use crate::errors;
use crate::fork;
use crate::interrupt::Interrupt;
use crate::load::{LoadArguments, reporter};

/// Packs the weights of a checkpoint, or random ones, into a file.
#[pyfunction]
#[pyo3(signature = (spec, weights, options, path, metadata, calibration=None, progress=None))]
#[expect(clippy::too_many_arguments, reason = "Python passes them by name")]
pub(crate) fn pack(
    py: Python<'_>,
    spec: &str,
    weights: Option<&str>,
    options: &str,
    path: &str,
    metadata: BTreeMap<String, String>,
    calibration: Option<Vec<Vec<u32>>>,
    progress: Option<Py<PyAny>>,
) -> PyResult<()> {
    let model = LoadArguments::read(spec, weights, options)?;
    let isa = errors::chosen_isa()?;
    let interrupt = Interrupt::new();
    let mut report = reporter(progress, &interrupt);
    let packed = py.detach(|| {
        let _guard = fork::hold_off_forks();
        let builder = model.builder().isa(isa).cancel(&interrupt.cancel).progress(&mut report);
        builder.pack(Path::new(path), &metadata, calibration.as_deref())
    });
    packed.map_err(|error| interrupt.build_error(&error))?;
    interrupt.settle(py);
    Ok(())
}

/// Returns the metadata of a packed file, as JSON, and the bytes of its tensors.
#[pyfunction]
pub(crate) fn packed_metadata(path: &str) -> PyResult<(String, u64)> {
    let file = open_packed(Path::new(path), false).map_err(|error| errors::load_error(&error))?;
    Ok((json!(file.all_metadata()).to_string(), file.total_bytes()))
}
