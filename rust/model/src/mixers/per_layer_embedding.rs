//! Per-layer embedding (Gemma 3n, Google DeepMind 2025): `output(activation(gate(x)) * e)`, where `e` is a vector of the
//! token for this layer: `e = (table_scale * table[token] + norm(projection_scale * projection(embedding))) * sum_scale`.
//!
//! The table has the vectors of all layers, side by side, and stays in its file. The other part of `e` is projected from
//! the token's embedding, which is what the first layer reads.

use ferrule_kernels::activation::activate;
use ferrule_kernels::{PackedMatrix, PoolError, RowsMut, Scratch};
use serde::{Deserialize, Serialize};

use super::{At, Mixer, MixerPass, TableColumns};
use crate::layer::{adapted, adapted_output, for_rows, norm_heads, scale_unless_one};
use crate::limits::{SpecError, finite, size};
use crate::memory::Memory;
use crate::rope::RopeSpec;
use crate::spec::{ActivationSpec, NormSpec, check_norm};
use crate::weights::{Linear, LoadError, Loader, Norm, Packer, Tensors};

/// Per-layer embedding.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PerLayerEmbeddingSpec {
    /// Length of a token's vector.
    pub width: usize,
    /// Activation of the gate.
    pub activation: ActivationSpec,
    /// Index of the table in [`crate::ModelSpec::tables`].
    pub table: usize,
    /// First column of the layer's vectors in the table.
    pub first_column: usize,
    /// Factor on the table's rows.
    pub table_scale: f32,
    /// Factor on the projection of the token's embedding.
    pub projection_scale: f32,
    /// Norm of this projection.
    pub norm: NormSpec,
    /// Factor on the sum of both parts.
    pub sum_scale: f32,
}

/// Weights of a per-layer embedding.
pub(crate) struct PerLayerEmbedding<M = PackedMatrix> {
    gate: Linear<M>,
    projection: Linear<M>,
    norm: Norm,
    output: Linear<M>,
}

/// Buffers of a per-layer embedding: `[rows, width]`.
#[derive(Default)]
pub(crate) struct Buffers {
    gates: Scratch<f32>,
    vectors: Scratch<f32>,
    table_rows: Scratch<f32>,
}

impl Mixer for PerLayerEmbeddingSpec {
    type Weights<M> = PerLayerEmbedding<M>;
    type Buffers = Buffers;

    fn check(&self, path: &str, _: &[RopeSpec], _: usize) -> Result<(), SpecError> {
        size(&format!("{path}.width"), self.width)?;
        finite(&format!("{path}.table_scale"), self.table_scale)?;
        finite(&format!("{path}.projection_scale"), self.projection_scale)?;
        finite(&format!("{path}.sum_scale"), self.sum_scale)?;
        check_norm(&format!("{path}.norm"), Some(self.norm))
    }

    fn load<P: Packer>(
        &self,
        loader: &Loader<'_>,
        packer: &mut P,
        At { prefix: at, .. }: At<'_>,
    ) -> Result<PerLayerEmbedding<P::Matrix>, LoadError> {
        let (hidden, width, usual) = (loader.hidden_size(), self.width, loader.usual());
        Ok(PerLayerEmbedding {
            gate: loader.linear(packer, at, &[("gate", width, usual)], hidden, false)?,
            projection: loader.linear(packer, at, &[("projection", width, usual)], hidden, false)?,
            norm: loader.norm(&format!("{at}projection_norm"), self.norm, width)?,
            output: loader.linear(packer, at, &[("output", hidden, usual)], width, false)?,
        })
    }

    fn list<'a, M>(weights: &'a PerLayerEmbedding<M>, tensors: &mut Tensors<'a, M>) {
        tensors.linear(&weights.gate);
        tensors.linear(&weights.projection);
        tensors.norm(&weights.norm);
        tensors.linear(&weights.output);
    }

    fn columns(&self) -> Option<TableColumns> {
        let tables = self.table..self.table.saturating_add(1);
        Some(TableColumns { tables, first: self.first_column, count: self.width, hashed_rows: None })
    }

    fn reads_embedding(&self) -> bool {
        true
    }

    fn buffer_floats(&self, _: usize, rows: usize) -> usize {
        3 * rows * self.width
    }

    fn longest_input(&self, hidden_size: usize) -> usize {
        hidden_size.max(self.width)
    }

    fn run(
        &self,
        weights: &PerLayerEmbedding,
        pass: &MixerPass<'_>,
        _: &mut Memory,
        x: &[f32],
        buffers: &mut Buffers,
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        let (exec, rows, width) = (&pass.exec, pass.rows.count, self.width);
        let Buffers { gates, vectors, table_rows } = buffers;
        let vectors = vectors.take(rows * width);
        adapted(exec, &weights.projection, pass.adapters, pass.embedding, vectors)?;
        scale_unless_one(exec, vectors, self.projection_scale)?;
        norm_heads(exec, &weights.norm, RowsMut::new(vectors, width, 0), 1, width)?;
        let table_rows = table_rows.take(rows * width);
        let (table, tokens) = (&pass.tables[self.table], &pass.rows.tokens);
        for_rows(exec, rows, table_rows, width, |row, out| table.read(tokens[row], self.first_column, out))?;

        let gates = gates.take(rows * width);
        adapted(exec, &weights.gate, pass.adapters, x, gates)?;
        activate(exec, gates, self.activation.into())?;
        let (vectors, table_rows) = (&*vectors, &*table_rows);
        for_rows(exec, rows, gates, width, |row, gates| {
            let parts = vectors[row * width..].iter().zip(&table_rows[row * width..]);
            for (gate, (projected, stored)) in gates.iter_mut().zip(parts) {
                *gate *= (stored * self.table_scale + projected) * self.sum_scale;
            }
        })?;
        adapted_output(exec, &weights.output, pass.adapters, gates, out)
    }
}
