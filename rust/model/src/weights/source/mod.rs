//! Sources of weights: the trait [`WeightSource`], with a file for each implementation.

mod checkpoint;
mod packed;
mod random;

use std::rc::Rc;

use ferrule_formats::{Checkpoint, PackedFile};
use ferrule_kernels::Format;

use super::error::LoadError;
use super::plan::MatrixPlan;
use super::table::TableRows;
use crate::quantization::Quantization;
use crate::spec::{ModelSpec, TableSpec};
pub(super) use packed::matrix as packed_matrix;

/// Source of a model's weights.
#[derive(Clone, Copy)]
pub enum Source<'a> {
    /// The files of a checkpoint.
    Checkpoint(&'a Checkpoint),
    /// Weights that were packed before.
    Packed {
        /// The packed file.
        file: &'a PackedFile,
        /// Whether the weights may exceed memory and be read from a mapped file again and again.
        may_page: bool,
    },
    /// Random numbers, generated while they are packed.
    Random,
}

/// Finds the matrices and vectors of roles.
///
/// Finding checks names and shapes and reads no weights, so that the size of a model is known before anything is
/// allocated.
pub(crate) trait WeightSource<'a> {
    /// Returns the limit of the packed weights in bytes, or `None` if they may exceed memory.
    fn memory_limit(&self) -> Option<u64>;

    /// Finds the rows of a matrix and chooses their formats.
    fn matrix(&self, request: MatrixRequest<'_>) -> Result<MatrixPlan<'a>, LoadError>;

    /// Chooses the format of the matrix `name` of `[rows, columns]` whose rows are only looked up.
    fn lookup_format(&self, name: &str, shape: [usize; 2], quantization: Quantization) -> Result<Format, LoadError>;

    /// Finds the table `name`, which stays in its file; `<name>.weight` is its role.
    fn table(&self, name: &str, spec: TableSpec) -> Result<TableRows, LoadError>;

    /// Finds a vector of `rows` elements, or a table of `rows` rows if `columns` is given.
    fn vector(&self, role: &str, rows: usize, columns: Option<usize>) -> Result<VectorReader<'a>, LoadError>;

    /// Finds a table of integers below `below`: `[rows, columns]`. They are exact in f32.
    fn ids(&self, role: &str, shape: [usize; 2], below: usize) -> Result<VectorReader<'a>, LoadError>;

    /// Compares integers that follow from the config with those that a checkpoint stores, if it stores them.
    fn check_constants(&self, _role: &str, _expected: &[i64]) -> Result<(), LoadError> {
        Ok(())
    }
}

/// Fills a slice of the requested length with the values of a vector.
pub(crate) type VectorReader<'a> = Box<dyn Fn(&mut [f32]) -> Result<(), LoadError> + 'a>;

/// A matrix to be packed: the rows of several roles, stacked.
pub(crate) struct MatrixRequest<'r> {
    /// Name in a packed file.
    pub name: String,
    pub parts: &'r [MatrixPart<'r>],
    pub columns: usize,
    pub quantization: Quantization,
    /// Whether to check the values of quantized weights too, which reads them.
    pub check_values: bool,
}

/// The rows of one role in a matrix.
#[derive(Clone, Copy)]
pub(crate) struct MatrixPart<'r> {
    pub role: &'r str,
    pub rows: usize,
    /// Format that the quantization asks for.
    pub format: Format,
    /// The part of the role's tensor that the rows are, if they are not all of it.
    pub slice: Option<Slice>,
}

/// A part of a stored matrix: consecutive rows, perhaps transposed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slice {
    /// Rows and columns of the whole matrix.
    pub whole: [usize; 2],
    /// First row.
    pub first: usize,
    /// Number of rows.
    pub rows: usize,
    pub transposed: bool,
}

impl<'a> Source<'a> {
    /// Returns the implementation for the roles of `spec`.
    pub(crate) fn reader(self, spec: &'a ModelSpec) -> Rc<dyn WeightSource<'a> + 'a> {
        match self {
            Self::Checkpoint(checkpoint) => Rc::new(checkpoint::CheckpointWeights { checkpoint, spec }),
            Self::Packed { file, may_page } => Rc::new(packed::PackedWeights { file, may_page }),
            Self::Random => Rc::new(random::RandomWeights),
        }
    }
}
