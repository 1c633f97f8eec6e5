//! The engine as Python sees it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrule_engine::{
    self as engine, EncodeTask, EngineError, Metrics, Request, RequestError, SamplingParams, SharedProcessor, Text,
};
use ferrule_model::{LanguageModel, Transformer};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes};

use crate::errors;
use crate::fork;
use crate::interrupt::Interrupt;
use crate::load::{LoadArguments, reporter};
use crate::lora::{self, LoraAdapter};
use crate::outputs::StepOutput;
use crate::parameters::to_json;
use crate::processor::PythonProcessor;
use crate::structured::Grammar;

/// A text's tokens, their kinds and its salt.
type GivenText = (Vec<i64>, Vec<i64>, Option<String>);

/// A model with its weights, its key-value cache, its threads and its scheduler.
#[pyclass(frozen, module = "ferrule._native")]
pub(crate) struct Engine {
    /// None once it is closed.
    engine: Mutex<Option<engine::Engine<Transformer>>>,
    /// Read without waiting for whoever has the engine.
    metrics: Arc<Mutex<Metrics>>,
    interrupt: Interrupt,
    vocab_size: usize,
    info: String,
}

impl Engine {
    /// Runs `call` on the engine with Python's lock released and forks kept out.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut engine::Engine<Transformer>) -> T + Send,
    ) -> PyResult<T> {
        let result = py.detach(|| {
            let _gate = fork::keep_out();
            self.lock().as_mut().map(call)
        });
        result.ok_or_else(|| errors::EngineError::new_err("the engine is closed"))
    }

    fn lock(&self) -> MutexGuard<'_, Option<engine::Engine<Transformer>>> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn error(&self, error: &EngineError) -> PyErr {
        match error {
            EngineError::Cancelled => self.interrupt.take(),
            error => errors::engine_error(error),
        }
    }
}

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(signature = (spec, weights, options, progress=None, draft=None))]
    fn new(
        py: Python<'_>,
        spec: &str,
        weights: Option<&str>,
        options: &str,
        progress: Option<Py<PyAny>>,
        draft: Option<(String, Option<String>, String)>,
    ) -> PyResult<Self> {
        let model = LoadArguments::read(spec, weights, options)?;
        let draft =
            draft.as_ref().map(|(spec, weights, options)| LoadArguments::read(spec, weights.as_deref(), options));
        let draft = draft.transpose()?;
        let isa = errors::chosen_isa()?;
        let interrupt = Interrupt::new();
        let mut report = reporter(progress, &interrupt);
        let built = py.detach(|| {
            let _gate = fork::keep_out();
            let builder = model.builder().isa(isa).cancel(&interrupt.cancel).progress(&mut report);
            let builder = match draft {
                Some(draft) => builder.draft_model(draft.spec, draft.weights, draft.options),
                None => builder,
            };
            builder.build_with_info()
        });
        drop(report);
        let (engine, info) = built.map_err(|error| interrupt.build_error(&error))?;
        interrupt.settle(py);
        let (metrics, vocab_size) = (engine.published_metrics(), engine.model().vocab_size());
        Ok(Self { engine: Mutex::new(Some(engine)), metrics, interrupt, vocab_size, info: to_json(&info)? })
    }

    /// Loads a low-rank adapter for requests of this engine.
    fn load_lora(&self, py: Python<'_>, directory: &str, config: &str) -> PyResult<LoraAdapter> {
        let loader = self.with(py, |engine| engine.model().adapters())?;
        lora::load(py, &loader, directory, config)
    }

    /// Queues a request and returns its id.
    #[pyo3(signature = (prompt_token_ids, params, fork_of=None, lora=None, logits_processors=None, grammar=None))]
    #[expect(clippy::too_many_arguments, reason = "Python passes them by name")]
    fn add_request(
        &self,
        py: Python<'_>,
        prompt_token_ids: Vec<i64>,
        params: &str,
        fork_of: Option<u64>,
        lora: Option<&LoraAdapter>,
        logits_processors: Option<&Bound<'_, PyAny>>,
        grammar: Option<&Grammar>,
    ) -> PyResult<u64> {
        // Lists may have an id for each token of the vocabulary: other threads need not wait for that.
        let read = || {
            let params = SamplingParams::from_json(params, self.vocab_size).map_err(RequestError::from)?;
            Request::from_ids(&prompt_token_ids, self.vocab_size, params)
        };
        let mut request = py.detach(read).map_err(|error| errors::request_error(&error))?;
        request.adapter = lora.map(|lora| Arc::clone(&lora.0));
        if let Some(processors) = logits_processors {
            let caught = Arc::clone(&self.interrupt.caught);
            let processor = PythonProcessor::new(processors, self.vocab_size, caught)?;
            request.params.logits_processor = Some(SharedProcessor(Arc::new(processor)));
        }
        request.params.structured_outputs = grammar.map(|grammar| Arc::clone(&grammar.0));
        let added = self.with(py, |engine| match fork_of {
            Some(other) => engine.fork_request(request, engine::RequestId(other)),
            None => engine.add_request(request),
        })?;
        added.map(|id| id.0).map_err(|error| errors::request_error(&error))
    }

    /// One batched forward pass and a sample for each sequence that is due.
    fn step(&self, py: Python<'_>) -> PyResult<Vec<StepOutput>> {
        let outputs = self.with(py, |engine| engine.step(&self.interrupt.cancel))?;
        let outputs = outputs.map_err(|error| self.error(&error))?;
        self.interrupt.settle(py);
        outputs.into_iter().map(|output| StepOutput::new(py, output)).collect()
    }

    /// Ends a request at once.
    fn abort(&self, py: Python<'_>, request_id: u64) -> PyResult<bool> {
        self.with(py, |engine| engine.abort(engine::RequestId(request_id)))
    }

    /// Whether a step would do anything.
    fn has_unfinished_requests(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, |engine| engine.has_unfinished_requests())
    }

    /// The logits after each token from the one at `first` on, float32 `[tokens - first, vocab_size]`.
    #[pyo3(signature = (token_ids, lora=None, first=0))]
    fn logits<'py>(
        &self,
        py: Python<'py>,
        token_ids: Vec<i64>,
        lora: Option<&LoraAdapter>,
        first: usize,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let adapter = lora.map(|lora| &*lora.0);
        let logits = self.with(py, |engine| engine.logits(&token_ids, first, adapter, &self.interrupt.cancel))?;
        let logits = logits.map_err(|error| self.error(&error))?;
        self.interrupt.settle(py);
        floats(py, &logits)
    }

    /// What a task makes of texts, each given as its tokens, their kinds and a salt: float32, one after the other.
    fn encode<'py>(&self, py: Python<'py>, texts: Vec<GivenText>, task: &str) -> PyResult<Bound<'py, PyByteArray>> {
        let read = |(index, (tokens, types, salt)): (usize, GivenText)| {
            Text::from_ids(index, &tokens, &types, salt.map(Arc::from))
        };
        let encoded = self.with(py, |engine| {
            let task = EncodeTask::from_json(task)?;
            let texts = texts.into_iter().enumerate().map(read).collect::<Result<Vec<_>, _>>()?;
            engine.encode(&texts, &task, &self.interrupt.cancel)
        })?;
        let encoded = encoded.map_err(|error| self.error(&error))?;
        self.interrupt.settle(py);
        floats(py, &encoded)
    }

    /// The state after these tokens, as bytes.
    #[pyo3(signature = (token_ids, cache_salt, lora=None))]
    fn save_state<'py>(
        &self,
        py: Python<'py>,
        token_ids: Vec<i64>,
        cache_salt: Option<String>,
        lora: Option<&LoraAdapter>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let (salt, adapter) = (cache_salt.map(Arc::from), lora.map(|lora| &*lora.0));
        let state = self.with(py, |engine| engine.save_state(&token_ids, salt, adapter, &self.interrupt.cancel))?;
        let state = state.map_err(|error| self.error(&error))?;
        self.interrupt.settle(py);
        Ok(PyBytes::new(py, &state))
    }

    /// Brings a saved state into the prefix cache: its tokens, and how many of them are there now.
    fn restore_state(&self, py: Python<'_>, state: &[u8]) -> PyResult<(Vec<u32>, usize)> {
        self.with(py, |engine| engine.restore_state(state))?.map_err(|error| self.error(&error))
    }

    /// What the engine has done and how long it took, as JSON.
    fn metrics(&self) -> PyResult<String> {
        to_json(&self.metrics.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }

    /// Frees the weights, the cache and the threads.
    fn close(&self, py: Python<'_>) {
        // Not while others wait for Python's lock: gigabytes are unmapped, and a disk may have something to write.
        py.detach(|| {
            let _gate = fork::keep_out();
            drop(self.lock().take());
        });
    }

    /// What is loaded and how, as JSON.
    fn info(&self) -> &str {
        &self.info
    }
}

/// Numbers as bytes.
pub(crate) fn floats<'py>(py: Python<'py>, numbers: &[f32]) -> PyResult<Bound<'py, PyByteArray>> {
    PyByteArray::new_with(py, size_of_val(numbers), |bytes| {
        for (bytes, number) in bytes.as_chunks_mut().0.iter_mut().zip(numbers) {
            *bytes = number.to_le_bytes();
        }
        Ok(())
    })
}

/// What the sampler makes of a row of logits: the tokens kept, their probabilities, and the one chosen.
#[pyfunction]
pub(crate) fn sample_distribution(
    logits: Vec<f32>,
    params: &str,
    prompt: Vec<u32>,
    output: Vec<u32>,
) -> PyResult<(Vec<u32>, Vec<f64>, u32)> {
    let params = SamplingParams::from_json(params, logits.len()).map_err(|error| errors::parameter_error(&error))?;
    let distribution = engine::sampling::distribution(&logits, &params, &prompt, &output);
    let distribution = distribution.map_err(|error| errors::sample_error(&error))?;
    Ok((distribution.ids, distribution.probabilities, distribution.chosen))
}
