//! Conversion of the crates' errors to the exceptions of `ferrule.errors`.

use ferrule_engine::{self as engine, EncodeError, EngineFailure, GrammarError, RequestError, VocabularyError};
use ferrule_formats::{CheckpointError, PackedErrorKind};
use ferrule_kernels::arch::{Isa, IsaError};
use ferrule_model::{AdapterError, LoadError, PipelineError, SpecError, StageError, TensorError};
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use pyo3::{PyErrArguments, import_exception};
use serde_json::Value;

use crate::parameters::object;

import_exception!(ferrule.errors, ConfigError);
import_exception!(ferrule.errors, EngineError);
import_exception!(ferrule.errors, InsufficientMemoryError);
import_exception!(ferrule.errors, InvalidParameterError);
import_exception!(ferrule.errors, ModelFileError);
import_exception!(ferrule.errors, ModelWriteError);
import_exception!(ferrule.errors, PromptError);
import_exception!(ferrule.errors, PipelineStageError);
import_exception!(ferrule.errors, QueueFullError);
import_exception!(ferrule.errors, TokenizerError);
import_exception!(ferrule.errors, UnsupportedModelError);
import_exception!(ferrule.errors, UnsupportedTaskError);

/// Arguments of an InvalidParameterError.
struct Invalid {
    field: String,
    value: Value,
    requirement: String,
}

impl PyErrArguments for Invalid {
    fn arguments(self, py: Python<'_>) -> Py<PyAny> {
        let value = object(py, &self.value).map_or_else(|_| py.None(), Bound::unbind);
        (self.field, value, self.requirement)
            .into_pyobject(py)
            .map_or_else(|_| py.None(), |tuple| tuple.into_any().unbind())
    }
}

/// Returns an InvalidParameterError: `{field} must be {requirement}, got {value}`.
pub(crate) fn invalid(field: impl Into<String>, value: impl Into<Value>, requirement: impl Into<String>) -> PyErr {
    let (field, value, requirement) = (field.into(), value.into(), requirement.into());
    InvalidParameterError::new_err(Invalid { field, value, requirement })
}

pub(crate) fn parameter_error(error: &engine::InvalidParameterError) -> PyErr {
    let engine::InvalidParameterError { field, value, requirement } = error;
    invalid(field, value.clone(), requirement)
}

pub(crate) fn load_error(error: &LoadError) -> PyErr {
    let message = error.to_string();
    match error {
        LoadError::Spec(error) => spec_error(error),
        LoadError::Stage(StageError::Stages { stages, most, .. }) => {
            invalid("pipeline_parallel_size", *stages, format!("an integer from 1 to {most} for this model"))
        }
        LoadError::Stage(_) => UnsupportedModelError::new_err(message),
        LoadError::Packed(error) if matches!(*error.kind, PackedErrorKind::Write(_)) => {
            ModelWriteError::new_err(message)
        }
        LoadError::Packed(_)
        | LoadError::PackedAs { .. }
        | LoadError::NotQuantizable { .. }
        | LoadError::TooDense(_)
        | LoadError::NotExponential { .. }
        | LoadError::NotIntegers { .. }
        | LoadError::Id { .. }
        | LoadError::Constant { .. } => ModelFileError::new_err(message),
        LoadError::Checkpoint(error) => checkpoint_error(error),
        LoadError::PackedAlready { file } => {
            invalid("model", file.to_string_lossy(), "a checkpoint whose weights are not packed yet")
        }
        LoadError::Shape { .. } | LoadError::Recipe(_) => ConfigError::new_err(message),
        LoadError::Memory { .. } | LoadError::Weights { .. } => InsufficientMemoryError::new_err(message),
        LoadError::Cancelled => PyKeyboardInterrupt::new_err(()),
        LoadError::Panicked(_) | LoadError::NotFinite { .. } | LoadError::OutputNotFinite => {
            EngineError::new_err(message)
        }
    }
}

pub(crate) fn checkpoint_error(error: &CheckpointError) -> PyErr {
    ModelFileError::new_err(error.to_string())
}

pub(crate) fn adapter_error(error: &AdapterError) -> PyErr {
    let message = error.to_string();
    match error {
        AdapterError::Load(error) => load_error(error),
        AdapterError::Tensor { error: TensorError::Unsupported { .. }, .. } => UnsupportedModelError::new_err(message),
        _ => ConfigError::new_err(message),
    }
}

pub(crate) fn spec_error(error: &SpecError) -> PyErr {
    ConfigError::new_err(error.to_string())
}

/// Returns the instruction set that `FERRULE_ISA` names, or the fastest.
pub(crate) fn chosen_isa() -> PyResult<Isa> {
    Isa::from_environment().map_err(|error| isa_error(&error))
}

fn isa_error(error: &IsaError) -> PyErr {
    match error {
        IsaError::Unknown { name } => {
            invalid("FERRULE_ISA", name.as_str(), format!("one of {}", Isa::NAMES.join(", ")))
        }
        IsaError::Missing { name, available } => {
            invalid("FERRULE_ISA", name.as_str(), format!("an instruction set of this machine ({available})"))
        }
    }
}

pub(crate) fn build_error(error: &engine::BuildError) -> PyErr {
    use engine::BuildError as Error;
    match error {
        Error::Parameter(error) => parameter_error(error),
        Error::Load(error) => load_error(error),
        Error::Config(error) => config_error(error),
        Error::Pipeline(error) => pipeline_error(error),
        Error::Isa(error) => isa_error(error),
        Error::KvMemory { .. } => InsufficientMemoryError::new_err(error.to_string()),
    }
}

pub(crate) fn request_error(error: &RequestError) -> PyErr {
    let message = error.to_string();
    match error {
        RequestError::NoLogits => UnsupportedTaskError::new_err(message),
        RequestError::Parameter(error) => parameter_error(error),
        RequestError::TooManyBeams { beam_width, limit } => {
            let limits = "max_num_seqs, max_num_batched_tokens";
            invalid("beam_width", *beam_width, format!("<= {limit}, the sequences that fit in a step ({limits})"))
        }
        RequestError::BeamsExceedKv { beam_width, tokens, needed, pages } => invalid(
            "beam_width",
            *beam_width,
            format!(
                "smaller, or kv_cache_memory larger: with a prompt of {tokens} tokens it needs {needed} KV pages of {pages}"
            ),
        ),
        RequestError::QueueFull { .. } => QueueFullError::new_err(message),
        RequestError::Dead(failure) => dead_error(failure, message),
        _ => PromptError::new_err(message),
    }
}

pub(crate) fn grammar_error(error: &GrammarError) -> PyErr {
    let (field, value, requirement) = match error {
        GrammarError::TooLong { field, bytes, limit } => {
            (*field, Value::from(*bytes), format!("at most {limit} bytes long"))
        }
        GrammarError::TooDeep { field, limit } => {
            (*field, format!("more than {limit} levels").into(), format!("nested at most {limit} levels deep"))
        }
        GrammarError::Count { field, count, limit } => {
            (*field, Value::from(*count), format!("a list of 1 to {limit} items"))
        }
        GrammarError::TimeLimit { field, limit_seconds } => {
            let limit = format!("simple enough to compile within {limit_seconds} seconds");
            (*field, "a grammar that takes longer".into(), limit)
        }
        GrammarError::Busy { field, limit } => {
            let limit = format!("sent again later: {limit} others that are too complex are still being compiled");
            (*field, "a new grammar".into(), limit)
        }
        GrammarError::Refused { field, given, reason } => {
            (*field, Value::from(given.as_str()), format!("valid and supported ({reason})"))
        }
        GrammarError::Malformed(reason) => {
            ("structured_outputs", Value::Null, format!("an object that describes the output ({reason})"))
        }
    };
    invalid(field, value, requirement)
}

/// Converts the error of a single row of logits, without a request.
pub(crate) fn sample_error(error: &engine::SampleError) -> PyErr {
    invalid("logits", Value::Null, format!("a row that can be sampled ({error})"))
}

pub(crate) fn vocabulary_error(error: &VocabularyError) -> PyErr {
    TokenizerError::new_err(error.to_string())
}

pub(crate) fn engine_error(error: &ferrule_engine::EngineError) -> PyErr {
    use ferrule_engine::EngineError as Error;
    match error {
        Error::Request(error) => request_error(error),
        Error::Encode(error) => encode_error(error),
        Error::NoPrefixCache => invalid("enable_prefix_caching", false, "true to restore a saved state"),
        Error::State(error) => invalid("state", Value::Null, format!("a state that this model saved ({error})")),
        Error::OutOfMemory { .. } => InsufficientMemoryError::new_err(error.to_string()),
        Error::RemotePages => UnsupportedTaskError::new_err(error.to_string()),
        Error::Dead(failure) => dead_error(failure, error.to_string()),
        Error::Cancelled => EngineError::new_err(error.to_string()),
    }
}

/// Returns the error of a dead engine.
fn dead_error(failure: &EngineFailure, message: String) -> PyErr {
    match failure.lost_stage {
        Some(stage) => PipelineStageError::new_err((message, stage)),
        None => EngineError::new_err(message),
    }
}

fn pipeline_error(error: &PipelineError) -> PyErr {
    let message = error.to_string();
    match error {
        PipelineError::Link { worker, .. } | PipelineError::Mismatch { worker, .. } => {
            PipelineStageError::new_err((message, worker.stage))
        }
        PipelineError::Unsupported { .. } => UnsupportedModelError::new_err(message),
    }
}

fn encode_error(error: &EncodeError) -> PyErr {
    let message = error.to_string();
    match error {
        EncodeError::Malformed { message } => invalid("task", Value::Null, format!("a known task ({message})")),
        EncodeError::Dimensions { dimensions, embedding_size } => {
            invalid("dimensions", *dimensions, format!("an integer from 1 to {embedding_size}"))
        }
        EncodeError::Count { count, vocab_size } => {
            invalid("count", *count, format!("an integer from 1 to {vocab_size}"))
        }
        EncodeError::NoLogits | EncodeError::NoClassifier => UnsupportedTaskError::new_err(message),
        EncodeError::NotFinite { .. } => EngineError::new_err(message),
        _ => PromptError::new_err(message),
    }
}

fn config_error(error: &engine::ConfigError) -> PyErr {
    use engine::ConfigError as Error;
    match error {
        Error::Zero { field } => invalid(*field, 0, ">= 1"),
        Error::KvBudget { budget, needed } => {
            invalid("kv_cache_memory", *budget, format!(">= {needed}, the bytes that one sequence needs"))
        }
        Error::DraftVocab { expected, given } => invalid(
            "speculative_config.model",
            format!("a model with {given} tokens"),
            format!("a model with the same vocabulary of {expected} tokens"),
        ),
        Error::DraftNoLogits => invalid("speculative_config.model", "an encoder", "a model that generates text"),
        Error::NoPrefixes => {
            invalid("prefix_cache_dir", "a directory", "absent for a model that reads in both directions")
        }
        Error::RemotePages => invalid("prefix_cache_dir", "a directory", "absent with pipeline or tensor parallelism"),
        Error::PrefixCacheDir(error) => {
            use engine::DiskCacheError as Disk;
            let (Disk::Io { path, .. }
            | Disk::NotDirectory { path, .. }
            | Disk::Owner { path, .. }
            | Disk::Mode { path, .. }) = error;
            invalid("prefix_cache_dir", path.to_string_lossy(), format!("a private directory ({error})"))
        }
        Error::PoolCount { .. } | Error::PoolTooLarge { .. } => EngineError::new_err(error.to_string()),
    }
}
