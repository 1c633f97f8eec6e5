//! Logits processors of a request: Python code that runs within a step, which has released the GIL.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ferrule_engine::LogitsProcessor;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors;

/// `ferrule._params.logits_processors.LogitsProcessors`, with the array that it changes.
#[derive(Debug)]
pub(crate) struct PythonProcessor {
    /// Callable that takes the token ids of the output, four bytes each.
    processors: Py<PyAny>,
    /// Array of the logits, float32 `[vocab_size]`: written before the call, read after it.
    logits: PyBuffer<f32>,
    /// Set when Ctrl-C was raised in the callable.
    interrupted: Arc<AtomicBool>,
}

impl PythonProcessor {
    pub fn new(processors: &Bound<'_, PyAny>, vocab_size: usize, interrupted: Arc<AtomicBool>) -> PyResult<Self> {
        let logits = PyBuffer::get(&processors.getattr("logits")?)?;
        if logits.item_count() != vocab_size || logits.readonly() || !logits.is_c_contiguous() {
            let requirement = format!("a contiguous, writable array of {vocab_size} float32");
            let found = format!("an array of {}", logits.item_count());
            return Err(errors::invalid("logits_processors.logits", found, requirement));
        }
        Ok(Self { processors: processors.clone().unbind(), logits, interrupted })
    }

    fn call(&self, py: Python<'_>, output: &Bound<'_, PyBytes>, logits: &mut [f32]) -> PyResult<()> {
        self.logits.copy_from_slice(py, logits)?;
        self.processors.call1(py, (output,))?;
        self.logits.copy_to_slice(py, logits)
    }
}

impl LogitsProcessor for PythonProcessor {
    fn process(&self, output: &[u32], logits: &mut [f32]) -> Result<(), String> {
        let called = Python::try_attach(|py| {
            let bytes: Vec<u8> = output.iter().flat_map(|id| id.to_le_bytes()).collect();
            let output = PyBytes::new(py, &bytes);
            let first = self.call(py, &output, logits);
            // The first Ctrl-C is for the caller of the step, who gets it after the step: the callable runs again. A
            // second Ctrl-C is for a callable that does not return.
            let called = match first {
                Err(error) if error.is_instance_of::<PyKeyboardInterrupt>(py) => {
                    self.interrupted.store(true, Ordering::Relaxed);
                    self.call(py, &output, logits)
                }
                other => other,
            };
            called.map_err(|error| {
                let interrupted = error.is_instance_of::<PyKeyboardInterrupt>(py);
                if interrupted { "interrupted in a logits processor".to_owned() } else { error.value(py).to_string() }
            })
        });
        called.unwrap_or_else(|| Err("the interpreter shuts down".to_owned()))
    }
}
