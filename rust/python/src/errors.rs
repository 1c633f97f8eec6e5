//! From the crates' errors to the exceptions of `ferrule.errors`.

use ferrule_engine::{EncodeError, GrammarError, RequestError, VocabularyError};
use ferrule_formats::{CheckpointError, PackedErrorKind};
use ferrule_kernels::arch::Isa;
use ferrule_model::{AdapterError, LoadError, SpecError, TensorFault};
use pyo3::PyErr;
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::import_exception;

import_exception!(ferrule.errors, ConfigError);
import_exception!(ferrule.errors, EngineError);
import_exception!(ferrule.errors, InsufficientMemoryError);
import_exception!(ferrule.errors, InvalidParameterError);
import_exception!(ferrule.errors, ModelFileError);
import_exception!(ferrule.errors, ModelWriteError);
import_exception!(ferrule.errors, PromptError);
import_exception!(ferrule.errors, QueueFullError);
import_exception!(ferrule.errors, TokenizerError);
import_exception!(ferrule.errors, UnsupportedModelError);
import_exception!(ferrule.errors, UnsupportedTaskError);

pub(crate) fn load_error(error: &LoadError) -> PyErr {
    let message = error.to_string();
    match error {
        LoadError::Spec(error) => spec_error(error),
        LoadError::Packed(error) if matches!(*error.kind, PackedErrorKind::Write(_)) => {
            ModelWriteError::new_err(message)
        }
        LoadError::Packed(_) | LoadError::PackedAs { .. } => ModelFileError::new_err(message),
        LoadError::Checkpoint(error) => checkpoint_error(error),
        LoadError::PackedAlready { .. } => InvalidParameterError::new_err(message),
        LoadError::Shape { .. } => ConfigError::new_err(message),
        LoadError::Memory { .. } | LoadError::Weights { .. } => InsufficientMemoryError::new_err(message),
        LoadError::Cancelled => PyKeyboardInterrupt::new_err(()),
        LoadError::Panicked(_) | LoadError::NotFinite { .. } => EngineError::new_err(message),
    }
}

pub(crate) fn checkpoint_error(error: &CheckpointError) -> PyErr {
    ModelFileError::new_err(error.to_string())
}

pub(crate) fn adapter_error(error: &AdapterError) -> PyErr {
    let message = error.to_string();
    match error {
        AdapterError::Load(error) => load_error(error),
        AdapterError::Tensor { fault: TensorFault::Unsupported { .. }, .. } => UnsupportedModelError::new_err(message),
        _ => ConfigError::new_err(message),
    }
}

pub(crate) fn spec_error(error: &SpecError) -> PyErr {
    ConfigError::new_err(error.to_string())
}

/// The instruction set that `FERRULE_ISA` asks for, or the fastest.
pub(crate) fn chosen_isa() -> Result<Isa, PyErr> {
    Isa::from_environment().map_err(|error| InvalidParameterError::new_err(error.to_string()))
}

pub(crate) fn request_error(error: &RequestError) -> PyErr {
    let message = error.to_string();
    match error {
        RequestError::NoLogits => UnsupportedTaskError::new_err(message),
        RequestError::Param(_) | RequestError::TooManyBeams { .. } | RequestError::BeamsExceedKv { .. } => {
            InvalidParameterError::new_err(message)
        }
        RequestError::QueueFull { .. } => QueueFullError::new_err(message),
        RequestError::Dead { .. } => EngineError::new_err(message),
        _ => PromptError::new_err(message),
    }
}

pub(crate) fn grammar_error(error: &GrammarError) -> PyErr {
    InvalidParameterError::new_err(error.to_string())
}

pub(crate) fn vocabulary_error(error: &VocabularyError) -> PyErr {
    TokenizerError::new_err(error.to_string())
}

pub(crate) fn engine_error(error: &ferrule_engine::EngineError) -> PyErr {
    use ferrule_engine::EngineError as Error;
    match error {
        Error::Request(error) => request_error(error),
        Error::Encode(error) => encode_error(error),
        Error::State(_) | Error::NoPrefixCache => InvalidParameterError::new_err(error.to_string()),
        Error::OutOfMemory { .. } => InsufficientMemoryError::new_err(error.to_string()),
        Error::Cancelled | Error::Dead { .. } => EngineError::new_err(error.to_string()),
    }
}

fn encode_error(error: &EncodeError) -> PyErr {
    let message = error.to_string();
    match error {
        EncodeError::Malformed { .. } | EncodeError::Dimensions { .. } | EncodeError::Count { .. } => {
            InvalidParameterError::new_err(message)
        }
        EncodeError::NoLogits | EncodeError::NoClassifier => UnsupportedTaskError::new_err(message),
        EncodeError::NotFinite { .. } => EngineError::new_err(message),
        _ => PromptError::new_err(message),
    }
}
