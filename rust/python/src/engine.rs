//! The engine as Python sees it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrule_engine::{
    self as engine, DraftModel, EncodeTask, EngineConfig, EngineError, Metrics, Request, RequestError, SamplingParams,
    SharedProcessor, Text, pages,
};
use ferrule_kernels::kv::PAGE_TOKENS;
use ferrule_kernels::{Pool, machine};
use ferrule_model::{LanguageModel, LoadError, LoadOptions, ModelSpec, Progress, Quantization, Transformer};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes};
use serde_json::json;

use crate::errors::{self, InsufficientMemoryError};
use crate::figures::describe;
use crate::fork;
use crate::interrupt::Interrupt;
use crate::lora::{self, LoraAdapter};
use crate::options::Options;
use crate::outputs::StepOutput;
use crate::packing::{WeightFiles, reporter};
use crate::processor::PythonProcessor;
use crate::structured::Grammar;

/// The share of the free memory that the cache may grow into where the caller does not say: one half, since the
/// program around the engine needs memory too.
pub(crate) const DEFAULT_KV_SHARE: u64 = 2;

/// The share of the free memory that mapped weights leave where they may be more than it: they are read from their file
/// again and again as it is.
const PAGING_SHARE: u64 = 4;

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
        let spec = ModelSpec::from_json(spec).map_err(|error| errors::spec_error(&error))?;
        let options = Options::from_json(options, &spec)?;
        let isa = errors::chosen_isa()?;
        let interrupt = Interrupt::new();
        let mut report = reporter(progress, &interrupt);
        let pool = Arc::new(Pool::new(options.threads));
        let load = |spec: ModelSpec, weights: Option<&str>, options: &Options, report: Progress<'_>| {
            let _gate = fork::keep_out();
            let files = WeightFiles::open(weights, &spec, options.mmap)?;
            let source = files.source(options.allow_paging);
            let quantization = options.quantization.unwrap_or_else(|| Quantization::auto(source));
            let load = LoadOptions { quantization, kv_format: options.kv_format, isa };
            Transformer::load(spec, source, load, Arc::clone(&pool), &interrupt.cancel, report)
        };
        let load_error = |error: LoadError| match error {
            LoadError::Cancelled => interrupt.take(),
            error => errors::load_error(&error),
        };
        let loaded = py.detach(|| load(spec, weights, &options, &mut report));
        drop(report);
        let mut model = loaded.map_err(load_error)?;
        interrupt.settle(py);
        let mut draft = match draft {
            None => None,
            Some((spec, weights, options)) => {
                let spec = ModelSpec::from_json(&spec).map_err(|error| errors::spec_error(&error))?;
                let options = Options::from_json(&options, &spec)?;
                let loaded = py.detach(|| load(spec, weights.as_deref(), &options, &mut |_, _| {}));
                let model = loaded.map_err(load_error)?;
                interrupt.settle(py);
                Some(DraftModel { model, pages: Vec::new(), max_model_len: options.max_model_len })
            }
        };

        let mapped = model.mapped_bytes() + draft.as_ref().map_or(0, |draft| draft.model.mapped_bytes());
        let available = if mapped == 0 {
            machine::available_memory()
        } else {
            // What is mapped counts as free until it is read, and cannot be given to the cache too.
            let free = machine::memory_for_files();
            free.saturating_sub(mapped).max(if options.allow_paging { free / PAGING_SHARE } else { 0 })
        };
        let budget = options.kv_cache_memory.unwrap_or(available / DEFAULT_KV_SHARE);
        if budget > available {
            return Err(InsufficientMemoryError::new_err(format!(
                "kv_cache_memory is {budget} bytes; {available} bytes are available here"
            )));
        }
        let Options { max_model_len, max_num_seqs, max_num_batched_tokens, .. } = options;
        let divide = |model: &mut Transformer, budget: u64, max_model_len: usize| {
            let pages = pages::divide(model.kv_groups(), budget, max_model_len, max_num_seqs, max_num_batched_tokens)
                .map_err(|error| errors::config_error(&error))?;
            model.allocate_kv(&pages).map_err(|error| errors::load_error(&error))?;
            Ok::<_, PyErr>(pages)
        };
        // As many tokens of either model.
        let bytes =
            |model: &Transformer| model.kv_groups().iter().map(|group| u128::from(group.page_bytes)).sum::<u128>();
        let (of_model, of_draft) = (bytes(&model).max(1), draft.as_ref().map_or(0, |draft| bytes(&draft.model)));
        let draft_budget = (u128::from(budget) * of_draft / (of_model + of_draft)) as u64;
        if let Some(draft) = &mut draft {
            draft.pages = divide(&mut draft.model, draft_budget, draft.max_model_len)?;
        }
        let pages = divide(&mut model, budget - draft_budget, max_model_len)?;
        let groups = model.kv_groups();
        let mut info = describe(&model.weight_sizes(), model.quantization(), groups, &options, isa);
        info["mapped_bytes"] = json!(mapped);
        info["kv_cache_bytes"] =
            json!(groups.iter().zip(&pages).map(|(group, &pages)| group.page_bytes * pages as u64).sum::<u64>());
        info["kv_cache_tokens"] = json!(pages.iter().max().map(|pages| pages * PAGE_TOKENS));
        info["max_queued_requests"] = json!(options.max_queued_requests);
        info["target_itl"] = json!(options.target_itl.as_secs_f64());
        info["enable_prefix_caching"] = json!(options.enable_prefix_caching && model.abilities().causal);
        info["prefix_cache_dir"] = json!(options.prefix_cache_dir.as_ref().map(|directory| &directory.path));
        let vocab_size = model.vocab_size();
        let config = EngineConfig {
            pages,
            max_model_len,
            max_num_seqs,
            max_num_batched_tokens,
            max_queued_requests: options.max_queued_requests,
            target_itl: options.target_itl,
            enable_prefix_caching: options.enable_prefix_caching,
            prefix_cache_dir: options.prefix_cache_dir,
            speculative: options.speculative,
        };
        let engine = py.detach(|| {
            let _gate = fork::keep_out();
            engine::Engine::with_draft_model(model, draft, config)
        });
        let engine = engine.map_err(|error| errors::config_error(&error))?;
        info["max_model_len"] = json!(engine.max_model_len());
        let metrics = engine.published_metrics();
        Ok(Self { engine: Mutex::new(Some(engine)), metrics, interrupt, vocab_size, info: info.to_string() })
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
        let metrics = self.metrics.lock().unwrap_or_else(PoisonError::into_inner).clone();
        serde_json::to_string(&metrics).map_err(|error| errors::EngineError::new_err(error.to_string()))
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
