//! Attention over a batch.

use ferrule_kernels::attention::{AttentionShape, attention};
use ferrule_kernels::elementwise::clip;
use ferrule_kernels::kv::{KvShape, KvStore};
use ferrule_kernels::rope::{Rope, rope_in_place};
use ferrule_kernels::{Exec, PoolError, Rows, RowsMut, Scratch};

use super::latent;
use super::low_rank::AdapterRows;
use super::rows::RaggedRows;
use super::{adapted, norm_heads};
use crate::rope::{RopeRows, RopeSpec};
use crate::spec::{AttentionSpec, HeadProjections, NormedOver, ProjectionsSpec};
use crate::weights::{Attention, Heads, Projections};

/// Buffers of attention. Shapes: `[rows, width]`.
#[derive(Default)]
pub(crate) struct Buffers {
    /// Outputs of the projections from the layer's input.
    pub qkv: Scratch<f32>,
    /// Outputs of attention.
    pub mixed: Scratch<f32>,
    pub latent: latent::Buffers,
}

/// Attention of one layer over a batch.
pub(crate) struct AttentionPass<'a> {
    pub exec: Exec<'a>,
    pub weights: &'a Attention,
    pub spec: &'a AttentionSpec,
    /// Whether a row attends only to itself and the rows before it.
    pub causal: bool,
    pub ropes: &'a [RopeSpec],
    pub rows: &'a RaggedRows<'a>,
    pub adapters: AdapterRows<'a>,
    /// KV cache group of the layer.
    pub group: usize,
    /// Index of the layer in its group.
    pub place: usize,
}

impl AttentionPass<'_> {
    /// Computes `out` from `x`, both `[rows, hidden_size]`. Keys and values are written to their pages first and read
    /// from there.
    pub fn run(&self, store: &mut KvStore, x: &[f32], buffers: &mut Buffers, out: &mut [f32]) -> Result<(), PoolError> {
        let mixed = match (&self.weights.projections, &self.spec.projections) {
            (Projections::Heads(weights), ProjectionsSpec::Heads(spec)) => {
                self.heads(store, weights, spec, x, buffers)?
            }
            (Projections::Latent(weights), ProjectionsSpec::Latent(spec)) => {
                self.latent(store, weights, spec, x, buffers)?
            }
            _ => unreachable!("weights are loaded as the spec says"),
        };
        adapted(&self.exec, &self.weights.output, self.adapters, mixed, out)
    }

    /// Runs multi-head attention and returns `[rows, heads * value_dim]`.
    fn heads<'b>(
        &self,
        store: &mut KvStore,
        weights: &Heads,
        spec: &HeadProjections,
        x: &[f32],
        buffers: &'b mut Buffers,
    ) -> Result<&'b [f32], PoolError> {
        let HeadProjections { kv_heads, key_dim, .. } = *spec;
        let (exec, heads, width) = (&self.exec, self.spec.heads, weights.qkv.weight.rows());
        let Buffers { qkv, mixed, .. } = buffers;
        let qkv = qkv.take(self.rows.count * width);
        adapted(exec, &weights.qkv, self.adapters, x, qkv)?;
        let (first_key, first_value) = (heads * key_dim, (heads + kv_heads) * key_dim);
        let rotated = [(0, heads), (first_key, kv_heads)];
        let after_rope = spec.qk_norm.is_some_and(|qk_norm| qk_norm.after_rope);
        if after_rope {
            rotated.into_iter().try_for_each(|(first, heads)| self.rotate(qkv, width, first, heads, key_dim))?;
        }
        if let (Some(qk_norm), Some(norms)) = (spec.qk_norm, &weights.norms) {
            for ((first, heads), norm) in rotated.into_iter().zip(norms) {
                let (heads, dim) =
                    if qk_norm.over == NormedOver::Heads { (1, heads * key_dim) } else { (heads, key_dim) };
                norm_heads(exec, norm, RowsMut::new(qkv, width, first), heads, dim)?;
            }
        }
        if let Some(limit) = spec.clip {
            clip(exec, RowsMut::new(qkv, width, 0), width, limit)?;
        }
        if !after_rope {
            rotated.into_iter().try_for_each(|(first, heads)| self.rotate(qkv, width, first, heads, key_dim))?;
        }
        let view = |first| Rows::new(qkv, width, first);
        self.attend(store, view(0), view(first_key), view(first_value), mixed)
    }

    /// Applies the rotary embedding to heads of `head_dim` columns, from column `first` of `x: [rows, width]` on.
    pub(super) fn rotate(
        &self,
        x: &mut [f32],
        width: usize,
        first: usize,
        heads: usize,
        head_dim: usize,
    ) -> Result<(), PoolError> {
        let Some(index) = self.spec.rope else { return Ok(()) };
        let RopeSpec { rotary_dim, interleaved, .. } = self.ropes[index];
        let RopeRows { cos, sin } = &self.rows.ropes[index];
        let rope = Rope { heads, head_dim, rotary_dim, interleaved, cos, sin };
        rope_in_place(&self.exec, RowsMut::new(x, width, first), &rope)
    }

    /// Writes keys and values to their pages and returns the output of attention: `[rows, heads * value_dim]`.
    pub(super) fn attend<'b>(
        &self,
        store: &mut KvStore,
        queries: Rows<'_>,
        keys: Rows<'_>,
        values: Rows<'_>,
        mixed: &'b mut Scratch<f32>,
    ) -> Result<&'b [f32], PoolError> {
        let Self { exec, spec, rows, group, place, .. } = self;
        store.write(exec, *place, &rows.places[*group], keys, values)?;
        let KvShape { kv_heads, key_dim, value_dim, .. } = store.shape();
        let mixed = mixed.take(rows.count * spec.heads * value_dim);
        let shape = AttentionShape {
            heads: spec.heads,
            kv_heads,
            key_dim,
            value_dim,
            scale: spec.scale,
            bidirectional: !self.causal,
            window: spec.window,
            softcap: spec.softcap,
            slopes: spec.alibi_slopes.as_deref(),
            sinks: self.weights.sinks.as_deref(),
        };
        attention(exec, queries, store, *place, &shape, &rows.sequences[*group], mixed)?;
        Ok(mixed)
    }
}
