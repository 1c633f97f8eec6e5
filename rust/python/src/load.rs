//! Arguments with which Python loads, measures and packs models.

use std::path::PathBuf;

use ferrule_engine::{EngineBuilder, EngineOptions};
use ferrule_model::ModelSpec;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

use crate::errors;
use crate::fork;
use crate::interrupt::Interrupt;
use crate::parameters::to_json;

/// Spec, weights and options of a model.
pub(crate) struct LoadArguments {
    pub spec: ModelSpec,
    pub weights: Option<PathBuf>,
    pub options: EngineOptions,
}

impl LoadArguments {
    pub fn read(spec: &str, weights: Option<&str>, options: &str) -> PyResult<Self> {
        Ok(Self {
            spec: ModelSpec::from_json(spec).map_err(|error| errors::spec_error(&error))?,
            weights: weights.map(PathBuf::from),
            options: EngineOptions::from_json(options).map_err(|error| errors::parameter_error(&error))?,
        })
    }

    /// Returns a builder for the model. Made where Python is detached, since it cannot be sent between threads.
    pub fn builder<'a>(self) -> EngineBuilder<'a> {
        let builder = EngineBuilder::new(self.spec).options(self.options);
        match self.weights {
            Some(path) => builder.weights(path),
            None => builder,
        }
    }
}

/// Returns the figures of a model and the memory that it needs, as JSON.
#[pyfunction]
#[pyo3(signature = (spec, weights, options))]
pub(crate) fn measure(py: Python<'_>, spec: &str, weights: Option<&str>, options: &str) -> PyResult<String> {
    let model = LoadArguments::read(spec, weights, options)?;
    let isa = errors::chosen_isa()?;
    let measured = py.detach(|| {
        let _guard = fork::hold_off_forks();
        model.builder().isa(isa).measure()
    });
    to_json(&measured.map_err(|error| errors::build_error(&error))?)
}

/// Returns a function that reports the packed bytes to Python. An `Exception` of a progress bar does not end the work.
/// Other exceptions such as KeyboardInterrupt do, since a signal handler may run in the bar.
pub(crate) fn reporter(progress: Option<Py<PyAny>>, interrupt: &Interrupt) -> impl FnMut(u64, u64) + Send {
    move |done, total| {
        let Some(progress) = &progress else { return };
        Python::attach(|py| match progress.call1(py, (done, total)) {
            Err(error) if !error.is_instance_of::<PyException>(py) => interrupt.raise(error),
            Ok(_) | Err(_) => {}
        });
    }
}
