//! Adapters as Python sees them.

use std::path::Path;
use std::sync::Arc;

use ferrule_model::{Adapter, AdapterConfig, AdapterLoader};
use pyo3::prelude::*;

use crate::interrupt::Interrupt;
use crate::{errors, fork};

/// A low-rank adapter for one engine; alive as long as this or a request that has it.
#[pyclass(frozen, module = "ferrule._native")]
pub(crate) struct LoraAdapter(pub Arc<Adapter>);

#[pymethods]
impl LoraAdapter {
    /// The largest rank of its matrices.
    #[getter]
    fn rank(&self) -> usize {
        self.0.rank()
    }

    /// The base's modules that it changes.
    #[getter]
    fn modules(&self) -> Vec<String> {
        self.0.modules().to_vec()
    }

    /// Bytes of its packed matrices.
    #[getter]
    fn bytes(&self) -> u64 {
        self.0.bytes()
    }
}

/// Loads an adapter beside whatever its engine does.
pub(crate) fn load(py: Python<'_>, loader: &AdapterLoader, directory: &str, config: &str) -> PyResult<LoraAdapter> {
    let config = AdapterConfig::from_json(config).map_err(|error| errors::adapter_error(&error))?;
    // Of its own: what interrupts this load leaves a step that runs in another thread alone.
    let interrupt = Interrupt::new();
    let loaded = py.detach(|| {
        let _gate = fork::keep_out();
        loader.load(Path::new(directory), &config, &interrupt.cancel)
    });
    let adapter =
        loaded.map_err(|error| if error.is_cancelled() { interrupt.take() } else { errors::adapter_error(&error) })?;
    interrupt.settle(py);
    Ok(LoraAdapter(Arc::new(adapter)))
}
