//! Sizes of weights, in parameters and bytes, for packed matrices and for those that are only measured.

use std::iter::Sum;
use std::ops::{Add, Sub};

use ferrule_kernels::arch::LANES;
use ferrule_kernels::{Format, PackedMatrix};

use super::{Tensors, TokenTable, Weights};
use crate::spec::{ModelSpec, TableSpec};
use crate::stage::StageLayers;

/// Size of one or several matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MatrixSize {
    /// Number of weights.
    pub numbers: u64,
    /// Bytes of the packed matrices.
    pub bytes: u64,
    /// Part of `bytes` in each of [`Format::ALL`].
    pub by_format: [u64; Format::ALL.len()],
}

/// No matrix. Written out because arrays have defaults up to 32 elements only.
impl Default for MatrixSize {
    fn default() -> Self {
        Self { numbers: 0, bytes: 0, by_format: [0; Format::ALL.len()] }
    }
}

impl MatrixSize {
    /// Returns the size of a matrix in one format.
    pub fn of(format: Format, rows: usize, columns: usize) -> Self {
        let bytes = PackedMatrix::bytes_for(format, rows, columns).unwrap_or(u64::MAX);
        let by_format = std::array::from_fn(|index| if Format::ALL[index] == format { bytes } else { 0 });
        Self { numbers: rows as u64 * columns as u64, bytes, by_format }
    }

    /// Combines two sizes, field by field.
    fn with(self, other: Self, operation: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            numbers: operation(self.numbers, other.numbers),
            bytes: operation(self.bytes, other.bytes),
            by_format: std::array::from_fn(|index| operation(self.by_format[index], other.by_format[index])),
        }
    }
}

/// Sizes of a model's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightSizes {
    /// Number of weights in all matrices and tables; a tied matrix is counted once.
    pub parameters: u64,
    /// Number of weights that are active for a token; only the experts that run and one row of each table that is
    /// not hashed are counted.
    pub parameters_per_token: u64,
    /// Number of weights in the matrices of layers, without embedding and lm_head.
    pub layer_parameters: u64,
    /// Number of weights in the matrices of layers with which a token is multiplied: not those of idle experts. Those
    /// that several layers use are counted for each.
    pub layer_parameters_per_token: u64,
    /// Bytes of the packed matrices.
    pub weight_bytes: u64,
    /// Part of `weight_bytes` in each of [`Format::ALL`].
    pub bytes_by_format: [u64; Format::ALL.len()],
    /// Bytes of matrices that a decode step of one sequence reads: all but an untied embedding and the experts that do
    /// not run. Those that several layers use are counted for each.
    pub weight_bytes_per_token: u64,
    /// Bytes of norms, biases, and tables that are held in memory, in f32.
    pub vector_bytes: u64,
    /// Bytes of tables that stay in their file, whose rows are looked up by token.
    pub table_bytes: u64,
}

impl From<&PackedMatrix> for MatrixSize {
    fn from(matrix: &PackedMatrix) -> Self {
        let by_format = matrix.formats().map(|(format, panels)| Self::of(format, panels * LANES, matrix.cols()));
        // The last panel may be partly empty.
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
    /// Returns the sizes of the weights, which are those of the layers `stage`.
    pub fn sizes(&self, spec: &ModelSpec, stage: &StageLayers) -> WeightSizes {
        let Tensors { matrices, vectors } = self.tensors();
        let all = total(matrices);
        let layers: MatrixSize = self.layers.iter().map(|layer| total(layer.tensors().matrices)).sum();
        let blocks = self
            .layers
            .iter()
            .zip(&spec.layers[stage.range()])
            .flat_map(|(layer, spec)| layer.blocks.iter().zip(&spec.blocks));
        let idle = |shared: bool| -> MatrixSize {
            let used = blocks.clone().filter(|(used, _)| used.is_shared == shared);
            used.map(|(used, spec)| total(spec.mixer.idle(&used.block.mixer))).sum()
        };
        let shared: MatrixSize = self.layers.iter().map(|layer| total(layer.shared_tensors().matrices)).sum();
        let (read_again, idle) = (shared - idle(true), idle(false));
        let looked_up = self.embedding.iter().filter(|_| !spec.has_tied_lm_head());
        let looked_up = looked_up.filter_map(|embedding| embedding.tokens.as_ref());
        let unread: u64 = looked_up.map(|tokens| MatrixSize::from(&tokens.weight).bytes).sum();
        let rows = |rows: fn(&TableSpec) -> usize| {
            let numbers = spec.tables.iter().map(|table| rows(table) as u64 * table.columns as u64);
            numbers.fold(0, u64::saturating_add)
        };
        let tables = self.tables.iter().filter_map(TokenTable::stored);
        WeightSizes {
            parameters: all.numbers.saturating_add(rows(|table| table.rows)),
            parameters_per_token: (all - idle).numbers.saturating_add(rows(|table| usize::from(!table.hashed))),
            layer_parameters: layers.numbers,
            layer_parameters_per_token: (layers - idle + read_again).numbers,
            weight_bytes: all.bytes,
            bytes_by_format: all.by_format,
            weight_bytes_per_token: (all - idle + read_again).bytes.saturating_sub(unread),
            vector_bytes: vector_bytes(&vectors),
            table_bytes: tables.map(|table| table.bytes().len() as u64).sum(),
        }
    }

    /// Returns the bytes of each layer, without those of earlier layers that it uses.
    pub fn bytes_of_layers(&self) -> Vec<u64> {
        self.layers.iter().map(|layer| bytes(layer.tensors())).collect()
    }

    /// Returns the bytes of what precedes the layers and of what follows them, without the matrices and biases of the
    /// embedding and the lm_head, which have a row for each token.
    pub fn bytes_outside_layers(&self) -> (u64, u64) {
        let (mut tokens, mut before, mut lm_head) = (Tensors::default(), Tensors::default(), Tensors::default());
        if let Some(embedding) = &self.embedding {
            embedding.tokens.iter().for_each(|matrix| tokens.linear(matrix));
            embedding.list(&mut before);
        }
        self.lm_head.iter().for_each(|matrix| lm_head.linear(matrix));
        lm_head.vectors.extend(&self.lm_head_bias);
        self.streams.iter().for_each(|streams| streams.list_beginning(&mut before));
        let before = bytes(before);
        let after = bytes(self.tensors()) - before - self.bytes_of_layers().iter().sum::<u64>();
        (before - bytes(tokens), after - bytes(lm_head))
    }
}

fn bytes<M>(Tensors { matrices, vectors }: Tensors<'_, M>) -> u64
where
    for<'a> MatrixSize: From<&'a M>,
{
    total(matrices).bytes + vector_bytes(&vectors)
}

fn vector_bytes(vectors: &[&Vec<f32>]) -> u64 {
    vectors.iter().map(|vector| size_of_val(vector.as_slice()) as u64).sum()
}

fn total<'a, M: 'a>(matrices: impl IntoIterator<Item = &'a M>) -> MatrixSize
where
    MatrixSize: From<&'a M>,
{
    matrices.into_iter().map(MatrixSize::from).sum()
}
