//! What weights come to, in numbers and in bytes: those that are packed, and those that are only measured.

use std::iter::Sum;
use std::ops::{Add, Sub};

use ferrule_kernels::arch::LANES;
use ferrule_kernels::{Format, PackedMatrix};

use super::{Ffn, Layer, Tensors, Weights};
use crate::spec::{FfnSpec, LayerSpec, ModelSpec};

/// What a matrix, or several, come to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct MatrixSize {
    /// How many numbers there are.
    pub numbers: u64,
    /// How many bytes they take, packed.
    pub bytes: u64,
    /// How many of these in each of [`Format::ALL`].
    pub by_format: [u64; Format::ALL.len()],
}

impl MatrixSize {
    /// Of so many rows of `columns` numbers in one format.
    pub fn of(format: Format, rows: usize, columns: usize) -> Self {
        let bytes = PackedMatrix::bytes_for(format, rows, columns).unwrap_or(u64::MAX);
        let by_format = std::array::from_fn(|index| if Format::ALL[index] == format { bytes } else { 0 });
        Self { numbers: rows as u64 * columns as u64, bytes, by_format }
    }

    /// Both, number by number.
    fn with(self, other: Self, operation: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            numbers: operation(self.numbers, other.numbers),
            bytes: operation(self.bytes, other.bytes),
            by_format: std::array::from_fn(|index| operation(self.by_format[index], other.by_format[index])),
        }
    }
}

/// What a model's weights come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightSizes {
    /// Weights of the matrices, a tied one counted once.
    pub parameters: u64,
    /// Of those, what a token meets: of a mixture's experts those that run for it.
    pub parameters_per_token: u64,
    /// Weights of the layers' matrices, without embedding and head.
    pub layer_parameters: u64,
    /// Of those, what a token meets.
    pub layer_parameters_per_token: u64,
    /// Bytes of the packed matrices.
    pub weight_bytes: u64,
    /// Of those, how many in each of [`Format::ALL`].
    pub bytes_by_format: [u64; Format::ALL.len()],
    /// Bytes of the matrices that each decode step of one sequence reads: all but an embedding that is not the head too,
    /// and the experts that do not run.
    pub weight_bytes_per_token: u64,
    /// Bytes of norms, biases and tables, which are kept in f32.
    pub vector_bytes: u64,
}

impl From<&PackedMatrix> for MatrixSize {
    fn from(matrix: &PackedMatrix) -> Self {
        let by_format = matrix.formats().map(|(format, panels)| Self::of(format, panels * LANES, matrix.cols()));
        // A last panel may have fewer rows than there is room for.
        Self { numbers: matrix.rows() as u64 * matrix.cols() as u64, ..by_format.sum() }
    }
}

impl From<&MatrixSize> for MatrixSize {
    fn from(size: &MatrixSize) -> Self {
        *size
    }
}

impl Add for MatrixSize {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        self.with(other, u64::saturating_add)
    }
}

impl Sub for MatrixSize {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        self.with(other, u64::saturating_sub)
    }
}

impl Sum for MatrixSize {
    fn sum<I: Iterator<Item = Self>>(sizes: I) -> Self {
        sizes.fold(Self::default(), Add::add)
    }
}

impl<M> Weights<M>
where
    for<'a> MatrixSize: From<&'a M>,
{
    /// What they come to.
    pub fn sizes(&self, spec: &ModelSpec) -> WeightSizes {
        let Tensors { matrices, vectors } = self.tensors();
        let all = total(matrices);
        let layers: MatrixSize = self.layers.iter().map(|layer| total(layer.tensors().matrices)).sum();
        let idle: MatrixSize =
            self.layers.iter().zip(&spec.layers).map(|(layer, spec)| idle_experts(layer, spec)).sum();
        let is_tied = spec.lm_head.is_some_and(|lm_head| lm_head.tied);
        let unread = if is_tied { 0 } else { MatrixSize::from(&self.embedding.tokens).bytes };
        WeightSizes {
            parameters: all.numbers,
            parameters_per_token: (all - idle).numbers,
            layer_parameters: layers.numbers,
            layer_parameters_per_token: (layers - idle).numbers,
            weight_bytes: all.bytes,
            bytes_by_format: all.by_format,
            weight_bytes_per_token: (all - idle).bytes.saturating_sub(unread),
            vector_bytes: vectors.into_iter().map(|vector| size_of_val(vector.as_slice()) as u64).sum(),
        }
    }
}

fn total<'a, M: 'a>(matrices: impl IntoIterator<Item = &'a M>) -> MatrixSize
where
    MatrixSize: From<&'a M>,
{
    matrices.into_iter().map(MatrixSize::from).sum()
}

/// The matrices of as many of a layer's experts, all alike, as do not run for a token.
fn idle_experts<M>(layer: &Layer<M>, spec: &LayerSpec) -> MatrixSize
where
    for<'a> MatrixSize: From<&'a M>,
{
    match (&layer.ffn, &spec.ffn) {
        (Ffn::Experts(weights), FfnSpec::Experts(spec)) => {
            let idle = &weights.experts[spec.experts_per_token..];
            total(idle.iter().flat_map(|expert| [&expert.inner.weight, &expert.down.weight]))
        }
        _ => MatrixSize::default(),
    }
}
