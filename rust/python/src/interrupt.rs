//! Ctrl-C during a computation: a cancel flag that polls Python's pending signals.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ferrule_engine::BuildError;
use ferrule_kernels::Cancel;
use ferrule_model::LoadError;
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;

use crate::errors;

/// A cancel flag whose hook runs Python's signal handlers, with the exception that they raised.
pub(crate) struct Interrupt {
    pub cancel: Cancel,
    /// Whether an interrupt was caught in a step that continues.
    pub caught: Arc<AtomicBool>,
    raised: Arc<Mutex<Option<PyErr>>>,
}

impl Interrupt {
    pub fn new() -> Self {
        let raised = Arc::new(Mutex::new(None));
        let slot = Arc::clone(&raised);
        // Signals are handled on Python's main thread; on any other thread the check does nothing. None: the
        // interpreter shuts down.
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

    /// Cancels the work with an exception that was raised outside the hook, such as by a handler that ran in a callback.
    pub fn raise(&self, error: PyErr) {
        *self.raised.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        self.cancel.cancel();
    }

    /// Passes an interrupt on to Python, which raises it on the main thread. It is called after work that finished
    /// although the flag was set at the last moment or an interrupt was caught, so that its result is not lost.
    pub fn settle(&self, _py: Python<'_>) {
        let caught = self.caught.swap(false, Ordering::Relaxed);
        if self.cancel.is_cancelled() || caught {
            drop(self.take());
            // SAFETY: PyErr_SetInterrupt may be called at any time while the interpreter runs, which the token proves.
            unsafe { pyo3::ffi::PyErr_SetInterrupt() }
        }
    }

    /// Takes the exception that the handlers raised, and clears the flag.
    pub fn take(&self) -> PyErr {
        self.cancel.reset();
        let raised = self.raised.lock().unwrap_or_else(PoisonError::into_inner).take();
        raised.unwrap_or_else(|| PyKeyboardInterrupt::new_err(()))
    }

    /// Converts the error of a build; a cancelled build raises what the signal handlers raised.
    pub fn build_error(&self, error: &BuildError) -> PyErr {
        match error {
            BuildError::Load(LoadError::Cancelled) => self.take(),
            error => errors::build_error(error),
        }
    }
}
