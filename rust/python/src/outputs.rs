//! Outputs of a step.

use std::time::Duration;

use ferrule_engine::{self as engine, TokenLogprob, TraceCandidate};
use pyo3::prelude::*;

/// Output of one request in a step.
#[pyclass(frozen, get_all, module = "ferrule._native")]
pub(crate) struct StepOutput {
    request_id: u64,
    token_ids: Vec<u32>,
    finish_reason: Option<&'static str>,
    stop_token: Option<u32>,
    error: Option<String>,
    lost_stage: Option<usize>,
    logprobs: Vec<Py<TokenLogprobs>>,
    entropies: Vec<f64>,
    trace: Vec<Py<SampleTrace>>,
    prompt_logprobs: Vec<Py<TokenLogprobs>>,
    beams: Vec<Py<Beam>>,
    queued_seconds: Option<f64>,
    last_prefill_seconds: Option<f64>,
    first_token_seconds: Option<f64>,
    last_token_seconds: Option<f64>,
    preemptions: u32,
    cached_tokens: usize,
    processed_tokens: usize,
    drafted_tokens: usize,
    accepted_tokens: usize,
}

/// A sequence that a beam search found.
#[pyclass(frozen, get_all, module = "ferrule._native")]
pub(crate) struct Beam {
    token_ids: Vec<u32>,
    cumulative_logprob: f64,
    score: f64,
    stop_token: Option<u32>,
}

/// Log-probabilities, before any sampler stage.
#[pyclass(frozen, get_all, module = "ferrule._native")]
pub(crate) struct TokenLogprobs {
    sampled: (u32, f64, usize),
    top: Vec<(u32, f64, usize)>,
}

/// Trace of the selection of one token.
#[pyclass(frozen, get_all, module = "ferrule._native")]
pub(crate) struct SampleTrace {
    candidates: Vec<Py<Candidate>>,
    stages: Vec<(&'static str, usize, f64)>,
    draw: Option<f64>,
    chosen: u32,
}

/// A candidate of a trace.
#[pyclass(frozen, get_all, module = "ferrule._native")]
pub(crate) struct Candidate {
    id: u32,
    logit: f32,
    probability: f64,
    stage_probabilities: Vec<f64>,
    final_probability: f64,
    dropped_by: Option<&'static str>,
}

impl StepOutput {
    pub fn new(py: Python<'_>, output: engine::StepOutput) -> PyResult<Self> {
        let finish = output.finish.as_ref();
        let timing = output.timing;
        let converted = |logprobs: Vec<engine::TokenLogprobs>| -> PyResult<Vec<_>> {
            logprobs.into_iter().map(|logprobs| token_logprobs(py, &logprobs)).collect()
        };
        Ok(Self {
            request_id: output.request.0,
            finish_reason: finish.map(engine::FinishReason::name),
            stop_token: finish.and_then(engine::FinishReason::stop_token),
            error: finish.and_then(engine::FinishReason::error),
            lost_stage: finish.and_then(engine::FinishReason::lost_stage),
            token_ids: output.token_ids,
            logprobs: converted(output.logprobs)?,
            entropies: output.entropies,
            prompt_logprobs: converted(output.prompt_logprobs)?,
            beams: output.beams.into_iter().map(|beam| Py::new(py, Beam::from(beam))).collect::<PyResult<_>>()?,
            queued_seconds: timing.first_scheduled.as_ref().map(Duration::as_secs_f64),
            last_prefill_seconds: timing.last_prefill.as_ref().map(Duration::as_secs_f64),
            first_token_seconds: timing.first_token.as_ref().map(Duration::as_secs_f64),
            last_token_seconds: timing.last_token.as_ref().map(Duration::as_secs_f64),
            preemptions: timing.preemptions,
            cached_tokens: timing.cached_tokens,
            processed_tokens: timing.processed_tokens,
            drafted_tokens: timing.drafted_tokens,
            accepted_tokens: timing.accepted_tokens,
            trace: output.trace.into_iter().map(|trace| sample_trace(py, trace)).collect::<PyResult<_>>()?,
        })
    }
}

impl From<engine::Hypothesis> for Beam {
    fn from(hypothesis: engine::Hypothesis) -> Self {
        let engine::Hypothesis { token_ids, cumulative_logprob, score, stop_token } = hypothesis;
        Self { token_ids, cumulative_logprob, score, stop_token }
    }
}

fn token_logprobs(py: Python<'_>, logprobs: &engine::TokenLogprobs) -> PyResult<Py<TokenLogprobs>> {
    let triple = |logprob: &TokenLogprob| (logprob.id, logprob.logprob, logprob.rank);
    Py::new(py, TokenLogprobs { sampled: triple(&logprobs.sampled), top: logprobs.top.iter().map(triple).collect() })
}

fn sample_trace(py: Python<'_>, trace: engine::SampleTrace) -> PyResult<Py<SampleTrace>> {
    let candidate = |candidate: TraceCandidate| {
        let TraceCandidate { id, logit, probability, stage_probabilities, final_probability, dropped_by } = candidate;
        Py::new(py, Candidate { id, logit, probability, stage_probabilities, final_probability, dropped_by })
    };
    let candidates = trace.candidates.into_iter().map(candidate).collect::<PyResult<_>>()?;
    let stages = trace.stages.iter().map(|stage| (stage.name, stage.left, stage.entropy)).collect();
    Py::new(py, SampleTrace { candidates, stages, draw: trace.draw, chosen: trace.chosen })
}
