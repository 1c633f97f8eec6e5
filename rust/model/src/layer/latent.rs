//! Multi-head latent attention (DeepSeek-V2, 2024) over latents: the cache holds one latent and one rotated key part
//! per token, and nothing per head.
//!
//! The key of a head is `[up(latent), rotated]`. Its score with a query `(q, t)` is `q . up(latent) + t . rotated`,
//! which equals `up^T(q) . latent + t . rotated`: attention with one key-value head. Attention mixes latents, which
//! each head then projects to its values. Prefill and decode compute the same, so that both give the same bits.

use ferrule_kernels::kv::KvStore;
use ferrule_kernels::{Exec, PackedMatrix, PoolError, Product, Rows, RowsMut, Scratch, matmul_each};

use super::attention::{self, AttentionPass};
use super::low_rank::{HeadSide, add_to_heads};
use super::rows::for_rows;
use super::{adapted, norm_heads};
use crate::spec::LatentProjections;
use crate::weights::Latent;

/// Buffers of latent attention.
#[derive(Default)]
pub(crate) struct Buffers {
    /// Latent of the queries: `[rows, query_rank]`.
    query_latent: Scratch<f32>,
    /// `[rows, heads * (nope_dim + rope_dim)]`
    queries: Scratch<f32>,
    /// Rows grouped by head: `[heads, rows, width]`.
    by_head: Scratch<f32>,
    /// `by_head` after the matrix of each head.
    by_head_out: Scratch<f32>,
    /// Absorbed queries, as they are multiplied with the cache: `[rows, heads * (rope_dim + kv_rank)]`, the rotated
    /// part first.
    absorbed: Scratch<f32>,
    /// Keys as the cache stores them: `[rows, rope_dim + kv_rank]`.
    keys: Scratch<f32>,
    /// `[rows, heads * value_dim]`
    values: Scratch<f32>,
}

impl AttentionPass<'_> {
    /// Runs latent attention and returns `[rows, heads * value_dim]`.
    pub(super) fn latent<'b>(
        &self,
        store: &mut KvStore,
        weights: &Latent,
        spec: &LatentProjections,
        x: &[f32],
        buffers: &'b mut attention::Buffers,
    ) -> Result<&'b [f32], PoolError> {
        let LatentProjections { kv_rank, nope_dim, rope_dim, value_dim, .. } = *spec;
        let (exec, rows, heads) = (&self.exec, self.rows.count, self.spec.heads);
        let attention::Buffers { qkv, mixed, latent: buffers } = buffers;
        let width = weights.input.weight.rows();
        let input = qkv.take(rows * width);
        adapted(exec, &weights.input, self.adapters, x, input)?;
        let first_latent = width - kv_rank - rope_dim;
        norm_heads(exec, &weights.norm, RowsMut::new(input, width, first_latent), 1, kv_rank)?;

        let keys = buffers.keys.take(rows * (rope_dim + kv_rank));
        for_rows(exec, rows, keys, rope_dim + kv_rank, |row, key| {
            let (latent, rotated) = input[row * width..][..width][first_latent..].split_at(kv_rank);
            key[..rope_dim].copy_from_slice(rotated);
            key[rope_dim..].copy_from_slice(latent);
        })?;
        self.rotate(keys, rope_dim + kv_rank, 0, 1, rope_dim + kv_rank)?;

        let query_dim = nope_dim + rope_dim;
        let queries = buffers.queries.take(rows * heads * query_dim);
        let first_columns = |out: &mut [f32]| {
            for_rows(exec, rows, out, first_latent, |row, out| {
                out.copy_from_slice(&input[row * width..][..first_latent]);
            })
        };
        match &weights.queries {
            Some((norm, up)) => {
                let latent = buffers.query_latent.take(rows * first_latent);
                first_columns(latent)?;
                norm_heads(exec, norm, RowsMut::new(latent, first_latent, 0), 1, first_latent)?;
                adapted(exec, up, self.adapters, latent, queries)?;
            }
            None => first_columns(queries)?,
        }

        let unrotated = buffers.by_head.take(heads * rows * nope_dim);
        split_heads(exec, queries, (rows, heads), (query_dim, nope_dim), unrotated)?;
        let projected = buffers.by_head_out.take(heads * rows * kv_rank);
        each_head(self, &weights.key_up, unrotated, projected)?;
        add_to_heads(exec, (weights.up_site, HeadSide::Keys), self.adapters, unrotated, projected, (heads, rows))?;
        let absorbed_dim = rope_dim + kv_rank;
        let absorbed = buffers.absorbed.take(rows * heads * absorbed_dim);
        for_rows(exec, rows, absorbed, absorbed_dim, |index, out| {
            let (row, head) = (index / heads, index % heads);
            out[..rope_dim].copy_from_slice(&queries[index * query_dim + nope_dim..][..rope_dim]);
            out[rope_dim..].copy_from_slice(&projected[(head * rows + row) * kv_rank..][..kv_rank]);
        })?;
        self.rotate(absorbed, heads * absorbed_dim, 0, heads, absorbed_dim)?;

        let keys = |first| Rows::new(keys, absorbed_dim, first);
        let absorbed = Rows::new(absorbed, heads * absorbed_dim, 0);
        let mixed = self.attend(store, absorbed, keys(0), keys(rope_dim), mixed)?;

        let latents = buffers.by_head.take(heads * rows * kv_rank);
        split_heads(exec, mixed, (rows, heads), (kv_rank, kv_rank), latents)?;
        let head_values = buffers.by_head_out.take(heads * rows * value_dim);
        each_head(self, &weights.value_up, latents, head_values)?;
        add_to_heads(exec, (weights.up_site, HeadSide::Values), self.adapters, latents, head_values, (heads, rows))?;
        let values = buffers.values.take(rows * heads * value_dim);
        for_rows(exec, rows, values, value_dim, |index, out| {
            let (row, head) = (index / heads, index % heads);
            out.copy_from_slice(&head_values[(head * rows + row) * value_dim..][..value_dim]);
        })?;
        Ok(values)
    }
}

/// Groups the first `width` columns of each head of `x: [rows, heads * head_dim]` by head: `out: [heads, rows, width]`.
fn split_heads(
    exec: &Exec<'_>,
    x: &[f32],
    (rows, heads): (usize, usize),
    (head_dim, width): (usize, usize),
    out: &mut [f32],
) -> Result<(), PoolError> {
    for_rows(exec, rows, out, width, |index, out| {
        let (head, row) = (index / rows, index % rows);
        out.copy_from_slice(&x[(row * heads + head) * head_dim..][..width]);
    })
}

/// Multiplies the rows of each head, `[heads, rows, columns]`, with the matrix of the head.
fn each_head(pass: &AttentionPass<'_>, matrices: &[PackedMatrix], x: &[f32], out: &mut [f32]) -> Result<(), PoolError> {
    let heads = matrices.len();
    let inputs = x.chunks_exact(x.len() / heads);
    let outputs = out.chunks_exact_mut(out.len() / heads);
    let mut products: Vec<_> =
        matrices.iter().zip(inputs).zip(outputs).map(|((w, x), out)| Product { x, w, out }).collect();
    matmul_each(&pass.exec, &mut products)
}
