//! [`AdapterError`]: why an adapter could not be loaded.

use std::path::PathBuf;

use crate::weights::LoadError;

/// An adapter could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    /// The JSON is not an adapter configuration; an unknown field is one of the reasons.
    #[error("adapter: {0}")]
    Config(String),
    /// The file cannot be read, or memory is too small.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The model does not have a target module.
    #[error("{}: target_modules has {target:?}, but the model has no such module{}", file.display(), nearest_name(nearest))]
    Target {
        /// Path of the configuration.
        file: PathBuf,
        /// Name of the target.
        target: String,
        /// Nearest name that the model has.
        nearest: Option<String>,
    },
    /// A scale exceeds f32.
    #[error(
        "{}: scale of {module:?} (from lora_alpha or alpha_pattern) must be at most {:e}, got {factor:e}",
        file.display(),
        f32::MAX
    )]
    Scale {
        /// Path of the configuration.
        file: PathBuf,
        /// Name of the module.
        module: String,
        /// Alpha divided by the rank, or by its square root.
        factor: f64,
    },
    /// A tensor cannot be applied.
    #[error("{}: tensor {tensor:?} {error}", file.display())]
    Tensor {
        /// Path of the tensor file.
        file: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Kind of the error.
        error: TensorError,
    },
    /// The file has no tensors.
    #[error("{}: has no tensors", file.display())]
    Empty {
        /// Path of the tensor file.
        file: PathBuf,
    },
}

impl AdapterError {
    /// Returns whether the load was cancelled.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        matches!(self, Self::Load(LoadError::Cancelled))
    }
}

/// Kinds of errors in a tensor of an adapter.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum TensorError {
    #[error("is missing, but target_modules of adapter_config.json names its module")]
    Missing,
    #[error("is missing, but the other matrix of its module is present")]
    Alone,
    #[error("must have shape {expected:?}, [{what}], got {found:?}")]
    Shape { found: Vec<usize>, expected: Vec<usize>, what: &'static str },
    #[error(
        "is not a matrix of a LoRA adapter; those are named base_model.model.<module>.lora_A.weight and .lora_B.weight"
    )]
    Name,
    #[error("belongs to a module that the model does not have{}", nearest_name(nearest))]
    NoModule { nearest: Option<String> },
    #[error("belongs to a module that target_modules of adapter_config.json does not name")]
    NoTarget,
    #[error("changes {what}; adapters are supported on linear layers that process every token")]
    Unsupported { what: &'static str },
}

fn nearest_name(nearest: &Option<String>) -> String {
    nearest.as_ref().map_or_else(String::new, |name| format!("; the nearest name is {name:?}"))
}
