//! What can be wrong with an adapter: the file, and the fact that it violates.

use std::path::PathBuf;

use crate::weights::LoadError;

/// Why an adapter could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    /// Not the JSON of an adapter's configuration: a field that this build does not know, among other things.
    #[error("adapter: {0}")]
    Config(String),
    /// Its file cannot be read, or there is too little memory.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A target that the model does not have.
    #[error("{}: target_modules names {target:?}; the model has no such module{}", file.display(), nearest_name(nearest))]
    Target {
        /// The configuration.
        file: PathBuf,
        /// What it names.
        target: String,
        /// A name that the model has.
        nearest: Option<String>,
    },
    /// A factor that f32 does not hold.
    #[error(
        "{}: lora_alpha or alpha_pattern gives {module:?} the factor {factor:e}; it must be at most {:e}",
        file.display(),
        f32::MAX
    )]
    Scale {
        /// The configuration.
        file: PathBuf,
        /// What it is the factor of.
        module: String,
        /// Alpha over the rank, or over its square root.
        factor: f64,
    },
    /// A tensor that cannot be applied.
    #[error("{}: tensor {tensor:?} {fault}", file.display())]
    Tensor {
        /// The tensors' file.
        file: PathBuf,
        /// Its name there.
        tensor: String,
        /// What is wrong with it.
        fault: TensorFault,
    },
    /// Nothing to apply.
    #[error("{}: has no tensors", file.display())]
    Empty {
        /// The tensors' file.
        file: PathBuf,
    },
}

impl AdapterError {
    /// Whether nothing is wrong but that the load was cancelled.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        matches!(self, Self::Load(LoadError::Cancelled))
    }
}

/// The violated fact.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum TensorFault {
    #[error("is missing, although target_modules of adapter_config.json names its module")]
    Missing,
    #[error("is missing, although the other one of its module is there")]
    Alone,
    #[error("has the shape {found:?}; it must be {expected:?}, [{what}]")]
    Shape { found: Vec<usize>, expected: Vec<usize>, what: &'static str },
    #[error(
        "is no matrix of a LoRA adapter; those are called base_model.model.<module>.lora_A.weight and .lora_B.weight"
    )]
    Name,
    #[error("is of a module that the model does not have{}", nearest_name(nearest))]
    NoModule { nearest: Option<String> },
    #[error("is of a module that target_modules of adapter_config.json does not name")]
    NoTarget,
    #[error("changes {what}; ferrule applies adapters to linear maps that every token goes through")]
    Unsupported { what: &'static str },
}

fn nearest_name(nearest: &Option<String>) -> String {
    nearest.as_ref().map_or_else(String::new, |name| format!("; the nearest name is {name:?}"))
}
