//! LoRA adapters.

use std::path::Path;
use std::sync::Arc;

use ferrule_model::{Adapter, AdapterConfig, AdapterLoader};
use pyo3::prelude::*;

use crate::interrupt::Interrupt;
use crate::{errors, fork};

/// A LoRA adapter for one engine; it is freed when neither Python nor a request refers to it.
#[pyclass(frozen, module = "ferrule._native")]
pub(crate) struct LoraAdapter(pub Arc<Adapter>);

#[pymethods]
impl LoraAdapter {
    /// Returns the largest rank of the adapter's matrices.
    #[getter]
    fn rank(&self) -> usize {
        self.0.rank()
    }

    /// Returns the modules of the base model that the adapter changes.
    #[getter]
    fn modules(&self) -> Vec<String> {
        self.0.modules().to_vec()
    }

    /// Returns the bytes of the packed matrices.
    #[getter]
    fn bytes(&self) -> u64 {
        self.0.bytes()
    }
}

/// Loads an adapter while the engine continues to run steps.
pub(crate) fn load(py: Python<'_>, loader: &AdapterLoader, directory: &str, config: &str) -> PyResult<LoraAdapter> {
    let config = AdapterConfig::from_json(config).map_err(|error| errors::adapter_error(&error))?;
    // A separate flag: an interrupt of this load must not cancel a step that runs in another thread.
    let interrupt = Interrupt::new();
    let loaded = py.detach(|| {
        let _guard = fork::hold_off_forks();
        loader.load(Path::new(directory), &config, &interrupt.cancel)
    });
    let adapter =
        loaded.map_err(|error| if error.is_cancelled() { interrupt.take() } else { errors::adapter_error(&error) })?;
    interrupt.settle(py);
    Ok(LoraAdapter(Arc::new(adapter)))
}
