//! [`LoadError`]: why the weights of a model could not be loaded.

use std::path::PathBuf;

use ferrule_formats::{CheckpointError, PackedError};
use ferrule_kernels::{AllocError, PackError, PoolError, machine};

use crate::limits::SpecError;
use crate::recipe::RecipeError;
use crate::spec::Exponential;
use crate::stage::StageError;

/// The weights of a model could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The model spec is invalid.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The recipe does not fit the model.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// The layers cannot be a pipeline stage.
    #[error(transparent)]
    Stage(#[from] StageError),
    /// A checkpoint file cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A packed file cannot be read or written.
    #[error(transparent)]
    Packed(#[from] PackedError),
    /// A tensor's shape does not fit the config.
    #[error("tensor {tensor:?} must have shape {expected:?} ({role}) for this config, got {found:?}")]
    Shape {
        /// Name in the checkpoint.
        tensor: String,
        /// Shape in the checkpoint.
        found: Vec<usize>,
        /// Shape that the config requires.
        expected: Vec<usize>,
        /// Role of the tensor.
        role: String,
    },
    /// A tensor that is to be quantized has numbers that are not finite, or too large for the scales.
    #[error("tensor {tensor:?} must hold finite numbers that the integer formats can represent, got NaN or infinity")]
    NotQuantizable {
        /// Name in the checkpoint.
        tensor: String,
    },
    /// A tensor has more nonzero weights than its sparse format stores.
    #[error(transparent)]
    TooDense(PackError),
    /// A tensor that stores exponentials has a number of the wrong sign, or one that is not finite.
    #[error("tensor {tensor:?} must hold finite numbers {}, got {found}", match exponential {
        Exponential::Exp => ">= 0, because it stores exp(x)",
        Exponential::NegatedExp => "<= 0, because it stores -exp(x)",
    })]
    NotExponential {
        /// Name in the checkpoint.
        tensor: String,
        /// Exponential that the tensor stores.
        exponential: Exponential,
        /// Number found.
        found: f32,
    },
    /// A tensor of ids or constants has another type than integers.
    #[error("tensor {tensor:?} must hold integers (I32 or I64), got {dtype}")]
    NotIntegers {
        /// Name in the checkpoint.
        tensor: String,
        /// Type in the checkpoint.
        dtype: &'static str,
    },
    /// A table of ids has one that is too large or negative.
    #[error("tensor {tensor:?} must hold integers from 0 to {}, got {found}", below - 1)]
    Id {
        /// Name in the file.
        tensor: String,
        /// Number found.
        found: String,
        /// Number of ids.
        below: usize,
    },
    /// A stored constant differs from the one that follows from the config.
    #[error("tensor {tensor:?} must hold {expected} at index {index} ({role}) for this config, got {found}")]
    Constant {
        /// Name in the checkpoint.
        tensor: String,
        /// Index of the constant in the tensor.
        index: usize,
        /// Constant that follows from the config.
        expected: i64,
        /// Number found.
        found: i64,
        /// Role of the tensor.
        role: String,
    },
    /// An input of a linear layer was not finite during calibration.
    #[error("calibration: an input of {role} is not finite (NaN or infinity)")]
    NotFinite {
        /// Roles of the linear layer.
        role: String,
    },
    /// The model gave no finite logits or hidden states while bits were allocated.
    #[error("bit allocation: an output of the model is not finite (NaN or infinity)")]
    OutputNotFinite,
    /// An allocation exceeds the memory of the machine or the container.
    #[error("{what} needs {needs} bytes, but only {available} bytes are available")]
    Memory {
        /// Purpose of the allocation.
        what: &'static str,
        /// Bytes needed.
        needs: u64,
        /// Bytes that the machine and the container have left.
        available: u64,
    },
    /// The weights exceed memory; a packed file could be paged.
    #[error(
        "the model needs {needs} bytes for its packed weights, but only {available} bytes are available (allow_paging runs \
         a packed file from disk, slowly)"
    )]
    Weights {
        /// Bytes needed.
        needs: u64,
        /// Bytes that the machine and the container have left.
        available: u64,
    },
    /// A packed file has another quantization than the requested one.
    #[error("{}: is packed as {packed:?}, but {asked:?} was requested", file.display())]
    PackedAs {
        /// Path of the file.
        file: PathBuf,
        /// Quantization in its metadata.
        packed: String,
        /// Requested quantization.
        asked: &'static str,
    },
    /// The source of weights to pack is a packed file.
    #[error("{}: is already packed; pack the original checkpoint instead", file.display())]
    PackedAlready {
        /// Path of the file.
        file: PathBuf,
    },
    /// The load was cancelled.
    #[error("the load was cancelled")]
    Cancelled,
    /// A worker thread panicked, which is a bug in ferrule.
    #[error("a worker thread panicked while packing weights: {0}")]
    Panicked(String),
}

impl LoadError {
    /// Returns the error for a matrix whose size in bytes exceeds 64 bits.
    pub(crate) fn too_large() -> Self {
        PackError::Memory(AllocError { bytes: u64::MAX }).into()
    }
}

impl From<AllocError> for LoadError {
    fn from(error: AllocError) -> Self {
        PackError::Memory(error).into()
    }
}

impl From<PoolError> for LoadError {
    fn from(error: PoolError) -> Self {
        PackError::Pool(error).into()
    }
}

impl From<PackError> for LoadError {
    fn from(error: PackError) -> Self {
        match error {
            PackError::Pool(PoolError::Cancelled) => Self::Cancelled,
            PackError::Pool(PoolError::Panicked(message)) => Self::Panicked(message),
            error @ PackError::TooDense { .. } => Self::TooDense(error),
            PackError::Memory(AllocError { bytes }) => {
                Self::Memory { what: "a packed matrix", needs: bytes, available: machine::available_memory() }
            }
        }
    }
}
