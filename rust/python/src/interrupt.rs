//! Ctrl-C while Rust computes: a cancel flag that asks Python for pending signals.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ferrule_engine::BuildError;
use ferrule_kernels::Cancel;
use ferrule_model::LoadError;
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;

use crate::errors;

/// A cancel flag whose hook runs Python's signal handlers, and what they raised.
pub(crate) struct Interrupt {
    pub cancel: Cancel,
    /// Set where an interrupt was caught inside of a step that goes on.
    pub caught: Arc<AtomicBool>,
    raised: Arc<Mutex<Option<PyErr>>>,
}

impl Interrupt {
    pub fn new() -> Self {
        let raised = Arc::new(Mutex::new(None));
        let slot = Arc::clone(&raised);
        // Signals are handled on Python's main thread; on any other the check does nothing. While the interpreter
        // shuts down there is nothing to ask.
        let hook = move || match Python::try_attach(|py| py.check_signals()) {
            Some(Err(error)) => {
                *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                true
            }
            Some(Ok(())) => false,
            None => true,
        };
        Self { cancel: Cancel::with_poll(hook), caught: Arc::default(), raised }
    }

    /// Ends the work with what was raised elsewhere than in the hook, such as by a handler that ran in a callback.
    pub fn raise(&self, error: PyErr) {
        *self.raised.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        self.cancel.cancel();
    }

    /// For work that came to its end although the flag went up at the last moment, or an interrupt was caught on the
    /// way: its result counts, and the interrupt is given back to Python, which raises it on the main thread.
    pub fn settle(&self, _py: Python<'_>) {
        let caught = self.caught.swap(false, Ordering::Relaxed);
        if self.cancel.is_cancelled() || caught {
            drop(self.take());
            // SAFETY: may be called at any time while the interpreter runs; the token says that it does.
            unsafe { pyo3::ffi::PyErr_SetInterrupt() }
        }
    }

    /// What the handlers raised; the flag is down again.
    pub fn take(&self) -> PyErr {
        self.cancel.reset();
        let raised = self.raised.lock().unwrap_or_else(PoisonError::into_inner).take();
        raised.unwrap_or_else(|| PyKeyboardInterrupt::new_err(()))
    }

    /// Converts the error of a build; a cancelled one is what the handlers raised.
    pub fn build_error(&self, error: &BuildError) -> PyErr {
        match error {
            BuildError::Load(LoadError::Cancelled) => self.take(),
            error => errors::build_error(error),
        }
    }
}
