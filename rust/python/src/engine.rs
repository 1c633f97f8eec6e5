//! The engine's Python class.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrule_engine::{
    self as engine, EncodeTask, EngineError, EngineModel, Metrics, Request, RequestError, SamplingParams,
    SharedProcessor, Text,
};
use ferrule_model::LanguageModel;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyByteArray, PyBytes};

use crate::errors;
use crate::features::{self, FeatureRows};
use crate::fork;
use crate::interrupt::Interrupt;
use crate::load::{LoadArguments, reporter};
use crate::lora::{self, LoraAdapter};
use crate::outputs::StepOutput;
use crate::parameters::to_json;
use crate::processor::PythonProcessor;
use crate::stage;
use crate::structured::Grammar;

/// Token ids, token types and cache salt of a text.
type TextArguments = (Vec<i64>, Vec<i64>, Option<String>);

/// A model with its weights, its key-value cache, its threads and its scheduler.
#[pyclass(frozen, module = "ferrule._native")]
pub(crate) struct Engine {
    /// None after `close`.
    engine: Mutex<Option<engine::Engine<EngineModel>>>,
    /// Metrics that are read without waiting for a running step.
    metrics: Arc<Mutex<Metrics>>,
    interrupt: Interrupt,
    vocab_size: usize,
    info: String,
}

impl Engine {
    /// Runs `call` on the engine without the GIL; a fork waits until it returns.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut engine::Engine<EngineModel>) -> T + Send,
    ) -> PyResult<T> {
        let result = py.detach(|| {
            let _guard = fork::hold_off_forks();
            self.lock().as_mut().map(call)
        });
        result.ok_or_else(|| errors::EngineError::new_err("the engine is closed"))
    }

    fn lock(&self) -> MutexGuard<'_, Option<engine::Engine<EngineModel>>> {
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
    #[pyo3(signature = (spec, weights, options, progress=None, draft=None, stages=None))]
    fn new(
        py: Python<'_>,
        spec: &str,
        weights: Option<&str>,
        options: &str,
        progress: Option<Py<PyAny>>,
        draft: Option<(String, Option<String>, String)>,
        stages: Option<(Vec<i32>, NonZeroUsize)>,
    ) -> PyResult<Self> {
        let model = LoadArguments::read(spec, weights, options)?;
        let draft =
            draft.as_ref().map(|(spec, weights, options)| LoadArguments::read(spec, weights.as_deref(), options));
        let draft = draft.transpose()?;
        let streams = stages.map(|(sockets, ranks)| {
            let streams = sockets.into_iter().map(stage::stream).collect::<PyResult<Vec<_>>>()?;
            Ok::<_, PyErr>((streams, ranks))
        });
        let streams = streams.transpose()?;
        let isa = errors::chosen_isa()?;
        let interrupt = Interrupt::new();
        let mut report = reporter(progress, &interrupt);
        let built = py.detach(|| {
            let _guard = fork::hold_off_forks();
            let builder = model.builder().isa(isa).cancel(&interrupt.cancel).progress(&mut report);
            let builder = match draft {
                Some(draft) => builder.draft_model(draft.spec, draft.weights, draft.options),
                None => builder,
            };
            let builder = match streams {
                Some((streams, ranks)) => builder.stages(stage::links(streams, ranks, &interrupt.cancel)?),
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
        let loader = loader.ok_or_else(|| {
            errors::UnsupportedTaskError::new_err("adapters are not supported with pipeline or tensor parallelism")
        })?;
        lora::load(py, &loader, directory, config)
    }

    /// Queues a request and returns its id.
    #[pyo3(signature = (
        prompt_token_ids, params, fork_of=None, lora=None, logits_processors=None, grammar=None, features=Vec::new()
    ))]
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
        features: Vec<FeatureRows>,
    ) -> PyResult<u64> {
        // Lists can have an id for each token of the vocabulary, which takes long enough to release the GIL.
        let read = || {
            let params = SamplingParams::from_json(params, self.vocab_size).map_err(RequestError::from)?;
            Request::from_ids(&prompt_token_ids, self.vocab_size, params)
        };
        let mut request = py.detach(read).map_err(|error| errors::request_error(&error))?;
        request.features = py.detach(|| features.iter().map(FeatureRows::read).collect::<PyResult<_>>())?;
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

    /// Runs one batched forward pass and samples a token for each sequence that is due.
    fn step(&self, py: Python<'_>) -> PyResult<Vec<StepOutput>> {
        let outputs = self.with(py, |engine| engine.step(&self.interrupt.cancel))?;
        let outputs = outputs.map_err(|error| self.error(&error))?;
        self.interrupt.settle(py);
        outputs.into_iter().map(|output| StepOutput::new(py, output)).collect()
    }

    /// Aborts a request.
    fn abort(&self, py: Python<'_>, request_id: u64) -> PyResult<bool> {
        self.with(py, |engine| engine.abort(engine::RequestId(request_id)))
    }

    /// Returns whether a request is unfinished.
    fn has_unfinished_requests(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, |engine| engine.has_unfinished_requests())
    }

    /// Computes the logits after each token from the one at `first` on, float32 `[tokens - first, vocab_size]`.
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

    /// Encodes texts, each given as token ids, token types and a salt; returns their concatenated results as float32.
    fn encode<'py>(&self, py: Python<'py>, texts: Vec<TextArguments>, task: &str) -> PyResult<Bound<'py, PyByteArray>> {
        let read = |(index, (tokens, types, salt)): (usize, TextArguments)| {
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

    /// Computes the features of an image, float32 `[tokens, width]`, from its tiles: the place of each patch, and the patches,
    /// float32 `[patches, values]`.
    fn features<'py>(
        &self,
        py: Python<'py>,
        tiles: Vec<(Vec<u32>, PyBackedBytes)>,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let tile = |(places, patches): (Vec<u32>, PyBackedBytes)| {
            let features = features::rows(0, places.len(), &patches)?;
            Ok(Text { tokens: vec![0; places.len()], token_types: places, features: vec![features], ..Text::default() })
        };
        let tiles = py.detach(|| tiles.into_iter().map(tile).collect::<PyResult<Vec<_>>>())?;
        let computed =
            self.with(py, |engine| engine.encode(&tiles, &EncodeTask::Features {}, &self.interrupt.cancel))?;
        let computed = computed.map_err(|error| self.error(&error))?;
        self.interrupt.settle(py);
        floats(py, &computed)
    }

    /// Computes and saves the KV cache of a prompt, as bytes.
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

    /// Restores a saved state into the prefix cache; returns its tokens and the number of them that are cached now.
    fn restore_state(&self, py: Python<'_>, state: &[u8]) -> PyResult<(Vec<u32>, usize)> {
        self.with(py, |engine| engine.restore_state(state))?.map_err(|error| self.error(&error))
    }

    /// Returns counters, gauges and histograms as JSON.
    fn metrics(&self) -> PyResult<String> {
        to_json(&self.metrics.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }

    /// Frees the weights, the KV cache and the threads.
    fn close(&self, py: Python<'_>) {
        // Unmapping gigabytes and writing to the disk cache take long enough to release the GIL.
        py.detach(|| {
            let _guard = fork::hold_off_forks();
            drop(self.lock().take());
        });
    }

    /// Returns the figures of the model and the engine as JSON.
    fn info(&self) -> &str {
        &self.info
    }
}

/// Returns floats as bytes, little-endian.
pub(crate) fn floats<'py>(py: Python<'py>, numbers: &[f32]) -> PyResult<Bound<'py, PyByteArray>> {
    PyByteArray::new_with(py, size_of_val(numbers), |bytes| {
        for (bytes, number) in bytes.as_chunks_mut().0.iter_mut().zip(numbers) {
            *bytes = number.to_le_bytes();
        }
        Ok(())
    })
}

/// Samples from a row of logits: returns the tokens kept, their probabilities, and the sampled one.
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
