//! The blocks of a layer: attention and the feed-forward network.

use ferrule_kernels::activation::{Gating, gated};
use ferrule_kernels::attention::{AttentionSequence, AttentionShape, attention};
use ferrule_kernels::elementwise::add_bias;
use ferrule_kernels::kv::{KvRow, KvStore, PAGE_TOKENS};
use ferrule_kernels::norm::{NormWeights, layer_norm, rms_norm, rms_norm_heads};
use ferrule_kernels::rope::{Rope, rope_in_place};
use ferrule_kernels::{Exec, PoolError, Rows, RowsMut, Scratch, matmul};

use crate::batch::Batch;
use crate::rope::{RopeRows, RopeSpec};
use crate::spec::{AttentionSpec, FfnSpec, HeadNormSpec, NormSpec};
use crate::weights::{Layer, Linear, Norm};

/// The rows of a batch as layers need them; the same for all layers.
pub(crate) struct RaggedRows<'a> {
    /// Rows of all sequences together.
    pub count: usize,
    /// Angles of the rows, for each rotation of the spec.
    ropes: &'a [RopeRows],
    /// For each group of layers, where each row's key and value go.
    places: Vec<Vec<KvRow>>,
    /// For each group of layers, the sequences with their pages.
    sequences: Vec<Vec<AttentionSequence<'a>>>,
}

impl<'a> RaggedRows<'a> {
    pub fn new(batch: Batch<'a>, ropes: &[RopeSpec], groups: usize, tables: &'a mut Vec<RopeRows>) -> Self {
        tables.resize_with(ropes.len(), RopeRows::default);
        for (rope, table) in ropes.iter().zip(&mut *tables) {
            table.fill(
                rope,
                batch
                    .sequences
                    .iter()
                    .flat_map(|sequence| sequence.positions().map(|position| (position, sequence.prompt_len))),
            );
        }
        let places = (0..groups).map(|group| {
            let rows = batch.sequences.iter().flat_map(|sequence| {
                let pages = &sequence.pages[group];
                sequence
                    .positions()
                    .map(|position| KvRow { page: pages[position / PAGE_TOKENS], slot: position % PAGE_TOKENS })
            });
            rows.collect()
        });
        let sequences = (0..groups).map(|group| {
            let mut end = 0;
            let sequences = batch.sequences.iter().map(|sequence| {
                let rows = sequence.tokens.len();
                end += rows;
                let first_position = sequence.first_position;
                AttentionSequence { first_row: end - rows, rows, first_position, pages: &sequence.pages[group] }
            });
            sequences.collect()
        });
        Self { count: batch.tokens().count(), places: places.collect(), sequences: sequences.collect(), ropes: tables }
    }
}

/// One layer's attention over a batch.
pub(crate) struct AttentionPass<'a> {
    pub exec: Exec<'a>,
    pub layer: &'a Layer,
    pub spec: &'a AttentionSpec,
    pub ropes: &'a [RopeSpec],
    pub rows: &'a RaggedRows<'a>,
    /// The layer's group.
    pub group: usize,
    /// The layer's number within its group.
    pub place: usize,
}

impl AttentionPass<'_> {
    /// From `x` to `out`, both `[rows, hidden_size]`. Keys and values go to their pages first and are read from there.
    pub fn run(
        &self,
        store: &mut KvStore,
        x: &[f32],
        qkv: &mut Scratch<f32>,
        mixed: &mut Scratch<f32>,
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        let Self { exec, layer, rows, .. } = self;
        let AttentionSpec { heads, kv_heads, key_dim, value_dim, scale, window, .. } = *self.spec;
        let width = layer.qkv.weight.rows();
        let qkv = qkv.take(rows.count * width);
        linear(exec, &layer.qkv, x, qkv)?;
        let (first_key, first_value) = (heads * key_dim, (heads + kv_heads) * key_dim);
        let rotated = [(0, heads), (first_key, kv_heads)];
        if let (Some(HeadNormSpec::Rms { eps, weight_offset }), Some(weights)) = (self.spec.qk_norm, &layer.qk_norm) {
            for ((first, heads), weight) in rotated.into_iter().zip(weights) {
                let weights = NormWeights { weight: Some(weight), bias: None, weight_offset, eps };
                rms_norm_heads(exec, RowsMut::new(qkv, width, first), heads, key_dim, &weights)?;
            }
        }
        if let Some(index) = self.spec.rope {
            let RopeSpec { rotary_dim, interleaved, .. } = self.ropes[index];
            let RopeRows { cos, sin } = &rows.ropes[index];
            for (first, heads) in rotated {
                let rope = Rope { heads, head_dim: key_dim, rotary_dim, interleaved, cos, sin };
                rope_in_place(exec, RowsMut::new(qkv, width, first), &rope)?;
            }
        }
        let view = |first| Rows::new(qkv, width, first);
        store.write(exec, self.place, &rows.places[self.group], view(first_key), view(first_value))?;
        let mixed = mixed.take(rows.count * heads * value_dim);
        let shape = AttentionShape { heads, kv_heads, key_dim, value_dim, scale, window, softcap: None };
        attention(exec, view(0), store, self.place, &shape, &rows.sequences[self.group], mixed)?;
        linear(exec, &layer.output, mixed, out)
    }
}

/// Rows that go through the feed-forward network at a time. What is between its matrices is several times wider than the
/// rows: this bounds the memory that it takes, and keeps it in the cache.
const FFN_ROWS: usize = 256;

/// From `x` to `out`, both `[rows, hidden_size]`.
pub(crate) fn feed_forward(
    exec: &Exec<'_>,
    layer: &Layer,
    spec: &FfnSpec,
    x: &[f32],
    gate_up: &mut Scratch<f32>,
    activated: &mut Scratch<f32>,
    out: &mut [f32],
) -> Result<(), PoolError> {
    let FfnSpec::Gated { intermediate_size, activation, .. } = *spec;
    let width = layer.gate_up.weight.cols();
    let rows = x.len() / width;
    // Pieces of the same size: a last one of one row would read all weights for it.
    let piece = rows.div_ceil(rows.div_ceil(FFN_ROWS).max(1)).max(1);
    let inner = gate_up.take(piece * 2 * intermediate_size);
    let activated = activated.take(piece * intermediate_size);
    for (x, out) in x.chunks(piece * width).zip(out.chunks_mut(piece * width)) {
        let rows = x.len() / width;
        let (inner, activated) =
            (&mut inner[..rows * 2 * intermediate_size], &mut activated[..rows * intermediate_size]);
        linear(exec, &layer.gate_up, x, inner)?;
        gated(exec, inner, intermediate_size, Gating::Plain(activation.into()), activated)?;
        linear(exec, &layer.down, activated, out)?;
    }
    Ok(())
}

/// `out = x W^T + b`
pub(crate) fn linear(exec: &Exec<'_>, linear: &Linear, x: &[f32], out: &mut [f32]) -> Result<(), PoolError> {
    matmul(exec, x, &linear.weight, out)?;
    linear.bias.iter().try_for_each(|bias| add_bias(exec, out, bias))
}

pub(crate) fn norm(exec: &Exec<'_>, norm: &Norm, x: &[f32], out: &mut [f32]) -> Result<(), PoolError> {
    let (weight, bias) = (Some(norm.weight.as_slice()), norm.bias.as_deref());
    let width = norm.weight.len();
    match norm.spec {
        NormSpec::Rms { eps, weight_offset } => {
            rms_norm(exec, x, width, &NormWeights { weight, bias, weight_offset, eps }, out)
        }
        NormSpec::Layer { eps } => {
            layer_norm(exec, x, width, &NormWeights { weight, bias, weight_offset: 0.0, eps }, out)
        }
    }
}
