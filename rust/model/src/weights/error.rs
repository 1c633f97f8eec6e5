//! [`LoadError`]: why the weights of a model could not be loaded.

use std::path::PathBuf;

use ferrule_formats::{CheckpointError, PackedError};
use ferrule_kernels::{AllocError, PackError, PoolError, machine};

use crate::limits::SpecError;

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The description cannot be.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The files cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A packed file cannot be read or written.
    #[error(transparent)]
    Packed(#[from] PackedError),
    /// A tensor's shape is not what the config says.
    #[error("tensor {tensor:?} has the shape {found:?}; the config asks for {expected:?} ({role})")]
    Shape {
        /// Its name in the checkpoint.
        tensor: String,
        /// Its shape.
        found: Vec<usize>,
        /// What the config asks for.
        expected: Vec<usize>,
        /// What it is for.
        role: String,
    },
    /// What goes into a matrix as the calibration's text runs is not finite.
    #[error("calibration: an input of {role} is not a finite number")]
    NotFinite {
        /// The roles of its rows.
        role: String,
    },
    /// More than the machine or the container has.
    #[error("{what} needs {needs} bytes; {available} bytes are available here")]
    Memory {
        /// What was to be allocated.
        what: &'static str,
        /// Bytes needed.
        needs: u64,
        /// Bytes that the machine and the container have left.
        available: u64,
    },
    /// As [`LoadError::Memory`], of weights that could be read as they are needed.
    #[error(
        "the model needs {needs} bytes for its packed weights; {available} bytes are available here (with allow_paging \
         they are read from a packed file again and again, slowly)"
    )]
    Weights {
        /// Bytes needed.
        needs: u64,
        /// Bytes that the machine and the container have left.
        available: u64,
    },
    /// A packed file is of another quantization.
    #[error("{}: is packed as {packed:?}, where {asked:?} is asked for", file.display())]
    PackedAs {
        /// The file.
        file: PathBuf,
        /// What its metadata says.
        packed: String,
        /// What it was to be loaded as.
        asked: &'static str,
    },
    /// Weights that are packed were to be packed once more.
    #[error("{}: is packed already; pack the checkpoint that it was made of", file.display())]
    PackedAlready {
        /// The file.
        file: PathBuf,
    },
    /// The load was cancelled.
    #[error("the load was cancelled")]
    Cancelled,
    /// A defect of ferrule.
    #[error("a worker panicked while packing weights: {0}")]
    Panicked(String),
}

impl LoadError {
    /// Of a matrix whose bytes cannot be counted.
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
            PackError::Memory(AllocError { bytes }) => {
                Self::Memory { what: "a packed matrix", needs: bytes, available: machine::available_memory() }
            }
        }
    }
}
