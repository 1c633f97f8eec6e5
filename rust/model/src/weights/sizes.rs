//! What weights come to, in numbers and in bytes: those that are packed, and those that are only measured.

use std::iter::Sum;
use std::ops::{Add, Sub};

use ferrule_kernels::PackedMatrix;

use super::{Ffn, Layer, Tensors, Weights};
use crate::spec::{FfnSpec, LayerSpec, ModelSpec};

/// What a matrix, or several, come to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct MatrixSize {
    /// How many numbers there are.
    pub numbers: u64,
    /// How many bytes they take, packed.
    pub bytes: u64,
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
    /// Bytes of the matrices that each decode step of one sequence reads: all but an embedding that is not the head too,
    /// and the experts that do not run.
    pub weight_bytes_per_token: u64,
    /// Bytes of norms, biases and tables, which are kept in f32.
    pub vector_bytes: u64,
}

impl From<&PackedMatrix> for MatrixSize {
    fn from(matrix: &PackedMatrix) -> Self {
        Self { numbers: matrix.rows() as u64 * matrix.cols() as u64, bytes: matrix.bytes() as u64 }
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
        Self { numbers: self.numbers.saturating_add(other.numbers), bytes: self.bytes.saturating_add(other.bytes) }
    }
}

impl Sub for MatrixSize {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self { numbers: self.numbers.saturating_sub(other.numbers), bytes: self.bytes.saturating_sub(other.bytes) }
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
        let is_head = spec.head.is_some_and(|head| head.tied);
        let unread = if is_head { 0 } else { MatrixSize::from(&self.embedding.tokens).bytes };
        WeightSizes {
            parameters: all.numbers,
            parameters_per_token: (all - idle).numbers,
            layer_parameters: layers.numbers,
            layer_parameters_per_token: (layers - idle).numbers,
            weight_bytes: all.bytes,
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
