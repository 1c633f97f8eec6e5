//! Multi-head latent attention (DeepSeek-V2, 2024) over latents: the cache holds one latent and one rotated key part
//! per token, and nothing per head.
//!
//! The key of a head is `[up(latent), rotated]`. Its score with a query `(q, t)` is `q . up(latent) + t . rotated`,
//! which equals `up^T(q) . latent + t . rotated`: attention with one key-value head. Attention mixes latents, which
//! each head then projects to its values. Prefill and decode compute the same, so that both give the same bits.

use ferrule_kernels::indexer::Selection;
use ferrule_kernels::kv::{KvShape, KvStore};
use ferrule_kernels::{Exec, PackedMatrix, PoolError, Product, Rows, RowsMut, Scratch, matmul_each};
use serde::{Deserialize, Serialize};

use super::AttentionPass;
use crate::layer::{HeadSide, adapted, add_to_heads, for_rows, norm_heads};
use crate::limits::{SpecError, size};
use crate::spec::{NormSpec, check_norm};
use crate::weights::{HeadSplit, Linear, LoadError, Loader, MatrixPart, Norm, Packer, Site, Slice, Tensors};

/// Multi-head latent attention: keys and values of all heads are projected from one latent vector.
///
/// The cache holds the latent and the rotated part of the key, `key = [up(latent), rotated]`. A score is `up^T(query) .
/// latent + query . rotated`; attention mixes latents, which each head then projects to its values.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LatentProjections {
    /// Rank of the queries' latent; `None` if queries are projected directly.
    pub query_rank: Option<usize>,
    /// Rank of the latent of keys and values.
    pub kv_rank: usize,
    /// Number of leading elements of each query and key head that are not rotated.
    pub nope_dim: usize,
    /// Number of the other elements, which are rotated; all heads share one such part of the key.
    pub rope_dim: usize,
    /// Length of a value head.
    pub value_dim: usize,
    /// Norm of both latents.
    pub norm: NormSpec,
    /// Whether the projections from the input add a bias.
    pub bias: bool,
    /// Whether the projections from the latent to keys and values are stored as two stacks, `[heads, kv_rank,
    /// nope_dim]` for keys (transposed) and `[heads, value_dim, kv_rank]` for values. Otherwise they are one matrix, in
    /// which each head has `nope_dim` rows followed by `value_dim` rows.
    pub split: bool,
}

/// Weights of multi-head latent attention.
pub(crate) struct Latent<M = PackedMatrix> {
    /// Rows: the queries' latent, or all query heads; the latent of keys and values; the rotated part of the key.
    input: Linear<M>,
    /// Norm of the queries' latent, and the projection from there to all query heads.
    queries: Option<(Norm, Linear<M>)>,
    /// Norm of the latent of keys and values.
    norm: Norm,
    /// Projection of each head from the unrotated part of its query to the latent: `[kv_rank, nope_dim]`.
    key_up: Vec<M>,
    /// Projection of each head from mixed latents to its output: `[value_dim, kv_rank]`.
    value_up: Vec<M>,
    /// Number of the linear layer that `key_up` and `value_up` are slices of; see [`Site`].
    up_site: usize,
}

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

impl LatentProjections {
    pub(super) fn check(&self, path: &str, heads: usize) -> Result<(), SpecError> {
        let Self { query_rank, kv_rank, nope_dim, rope_dim, value_dim, norm, .. } = *self;
        let path = format!("{path}.projections");
        for (name, dim) in [
            ("query_rank", query_rank.unwrap_or(1)),
            ("kv_rank", kv_rank),
            ("nope_dim", nope_dim),
            ("rope_dim", rope_dim),
            ("value_dim", value_dim),
        ] {
            size(&format!("{path}.{name}"), dim)?;
        }
        size(&format!("heads * ({path}.nope_dim + rope_dim)"), heads * (nope_dim + rope_dim))?;
        size(&format!("heads * ({path}.nope_dim + value_dim)"), heads * (nope_dim + value_dim))?;
        size(&format!("heads * ({path}.kv_rank + rope_dim)"), heads * (kv_rank + rope_dim))?;
        check_norm(&format!("{path}.norm"), Some(norm))
    }

    /// Returns the shape of what the KV cache stores per token.
    pub(super) fn kv_shape(&self) -> KvShape {
        KvShape { layers: 1, kv_heads: 1, key_dim: self.kv_rank + self.rope_dim, value_dim: self.kv_rank, index_dim: 0 }
    }

    /// Returns the floats per row in buffers, of an attention with `heads` query heads.
    pub(super) fn floats(&self, heads: usize) -> usize {
        let Self { query_rank, kv_rank, nope_dim, rope_dim, value_dim, .. } = *self;
        let queries = heads * (nope_dim + rope_dim);
        let input = query_rank.map_or(queries, |rank| 2 * rank) + kv_rank + rope_dim;
        let keys = rope_dim + kv_rank;
        let by_head = heads * (nope_dim.max(kv_rank) + value_dim.max(kv_rank));
        input + queries + keys + by_head + heads * (keys + kv_rank + value_dim)
    }

    /// Loads the projections of an attention with `heads` query heads.
    pub(super) fn load<P: Packer>(
        &self,
        loader: &Loader<'_>,
        packer: &mut P,
        at: &str,
        heads: usize,
    ) -> Result<Latent<P::Matrix>, LoadError> {
        let LatentProjections { query_rank, kv_rank, nope_dim, rope_dim, value_dim, norm, bias, .. } = *self;
        let (hidden, usual) = (loader.hidden_size(), loader.usual());
        let query_columns = heads * (nope_dim + rope_dim);
        let first = query_rank.map_or(("q", query_columns, usual), |rank| ("q_a", rank, usual));
        let second = ("kv_a", kv_rank + rope_dim, usual);
        let mut input = loader.linear(packer, at, &[first, second], hidden, false)?;
        if bias {
            // Queries without a low-rank projection have no bias.
            let first = match query_rank {
                Some(rank) => (Some(format!("{at}q_a.bias")), rank),
                None => (None, query_columns),
            };
            input.bias = Some(loader.vectors(&[first, (Some(format!("{at}kv_a.bias")), kv_rank + rope_dim)])?);
        }
        let queries = match query_rank {
            Some(rank) => Some((
                loader.norm(&format!("{at}q_a_norm"), norm, rank)?,
                loader.linear(packer, at, &[("q_b", query_columns, usual)], rank, false)?,
            )),
            None => None,
        };
        let (mut key_up, mut value_up) = (Vec::with_capacity(heads), Vec::with_capacity(heads));
        for head in 0..heads {
            let [keys, values] = up_projections(at, heads, self, head);
            let keys = MatrixPart { role: &keys.0, rows: kv_rank, format: usual, slice: Some(keys.1) };
            let format = loader.values();
            let values = MatrixPart { role: &values.0, rows: value_dim, format, slice: Some(values.1) };
            let keys = loader.matrix(format!("{at}kv_b.{head}.keys"), &[keys], nope_dim)?;
            let values = loader.matrix(format!("{at}kv_b.{head}.values"), &[values], kv_rank)?;
            key_up.push(packer.pack(keys)?);
            value_up.push(packer.pack(values)?);
        }
        let norm = loader.norm(&format!("{at}kv_a_norm"), norm, kv_rank)?;
        let split = HeadSplit { heads, nope_dim, value_dim };
        let parts = vec![(format!("{at}kv_b"), heads * split.rows())];
        let up_site = packer.add_site(Site { parts, columns: kv_rank, heads: Some(split) });
        Ok(Latent { input, queries, norm, key_up, value_up, up_site })
    }
}

impl<M> Latent<M> {
    pub(super) fn list<'a>(&'a self, tensors: &mut Tensors<'a, M>) {
        tensors.linear(&self.input);
        if let Some((norm, linear)) = &self.queries {
            tensors.norm(norm);
            tensors.linear(linear);
        }
        tensors.norm(&self.norm);
        tensors.matrices.extend(self.key_up.iter().chain(&self.value_up));
    }
}

/// Returns where head `head` has its projections from the latent: to keys `[kv_rank, nope_dim]`, transposed because
/// queries are multiplied with it, and to values `[value_dim, kv_rank]`.
///
/// A checkpoint stores them as two matrices, or as one with the rows of each head's keys before those of its values.
fn up_projections(at: &str, heads: usize, spec: &LatentProjections, head: usize) -> [(String, Slice); 2] {
    let LatentProjections { kv_rank, nope_dim, value_dim, split, .. } = *spec;
    if split {
        let slice = |rows: usize, columns| Slice {
            whole: [heads * rows, columns],
            first: head * rows,
            rows,
            transposed: false,
        };
        return [
            (format!("{at}k_b.weight"), slice(kv_rank, nope_dim)),
            (format!("{at}v_b.weight"), slice(value_dim, kv_rank)),
        ];
    }
    let head_dim = nope_dim + value_dim;
    let (role, whole, first) = (format!("{at}kv_b.weight"), [heads * head_dim, kv_rank], head * head_dim);
    [
        (role.clone(), Slice { whole, first, rows: nope_dim, transposed: true }),
        (role, Slice { whole, first: first + nope_dim, rows: value_dim, transposed: false }),
    ]
}

impl AttentionPass<'_> {
    /// Runs latent attention and returns `[rows, heads * value_dim]`.
    pub(super) fn latent<'b>(
        &self,
        (store, selection): (&mut KvStore, &mut Selection),
        weights: &Latent,
        spec: &LatentProjections,
        x: &[f32],
        buffers: &'b mut super::InnerBuffers,
    ) -> Result<&'b mut [f32], PoolError> {
        let LatentProjections { kv_rank, nope_dim, rope_dim, value_dim, .. } = *spec;
        let (exec, rows, heads) = (&self.pass.exec, self.pass.rows.count, self.spec.heads);
        let super::InnerBuffers { qkv, mixed, latent: buffers, indexer, .. } = buffers;
        let width = weights.input.outputs;
        let input = qkv.take(rows * width);
        adapted(exec, &weights.input, self.pass.adapters, x, input)?;
        let first_latent = width - kv_rank - rope_dim;
        norm_heads(exec, &weights.norm, RowsMut::new(input, width, first_latent), 1, kv_rank)?;

        let keys = buffers.keys.take(rows * (rope_dim + kv_rank));
        for_rows(exec, rows, keys, rope_dim + kv_rank, |row, key| {
            let (latent, rotated) = input[row * width..][..width][first_latent..].split_at(kv_rank);
            key[..rope_dim].copy_from_slice(rotated);
            key[rope_dim..].copy_from_slice(latent);
        })?;
        self.rotate(self.spec.rope, RowsMut::new(keys, rope_dim + kv_rank, 0), 1, rope_dim + kv_rank)?;

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
                adapted(exec, up, self.pass.adapters, latent, queries)?;
                self.choose(store, selection, x, Some(latent), indexer)?;
            }
            None => {
                first_columns(queries)?;
                self.choose(store, selection, x, None, indexer)?;
            }
        }

        let unrotated = buffers.by_head.take(heads * rows * nope_dim);
        split_heads(exec, queries, (rows, heads), (query_dim, nope_dim), unrotated)?;
        let projected = buffers.by_head_out.take(heads * rows * kv_rank);
        each_head(exec, &weights.key_up, unrotated, projected)?;
        add_to_heads(exec, (weights.up_site, HeadSide::Keys), self.pass.adapters, unrotated, projected, (heads, rows))?;
        let absorbed_dim = rope_dim + kv_rank;
        let absorbed = buffers.absorbed.take(rows * heads * absorbed_dim);
        for_rows(exec, rows, absorbed, absorbed_dim, |index, out| {
            let (row, head) = (index / heads, index % heads);
            out[..rope_dim].copy_from_slice(&queries[index * query_dim + nope_dim..][..rope_dim]);
            out[rope_dim..].copy_from_slice(&projected[(head * rows + row) * kv_rank..][..kv_rank]);
        })?;
        self.rotate(self.spec.rope, RowsMut::new(absorbed, heads * absorbed_dim, 0), heads, absorbed_dim)?;
        self.grow(RowsMut::new(absorbed, heads * absorbed_dim, 0), heads * absorbed_dim)?;

        let keys = |first| Rows::new(keys, absorbed_dim, first);
        let absorbed = Rows::new(absorbed, heads * absorbed_dim, 0);
        let mixed = self.attend((store, selection), absorbed, Some([keys(0), keys(rope_dim)]), mixed)?;

        let latents = buffers.by_head.take(heads * rows * kv_rank);
        split_heads(exec, mixed, (rows, heads), (kv_rank, kv_rank), latents)?;
        let head_values = buffers.by_head_out.take(heads * rows * value_dim);
        each_head(exec, &weights.value_up, latents, head_values)?;
        add_to_heads(
            exec,
            (weights.up_site, HeadSide::Values),
            self.pass.adapters,
            latents,
            head_values,
            (heads, rows),
        )?;
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
fn each_head(exec: &Exec<'_>, matrices: &[PackedMatrix], x: &[f32], out: &mut [f32]) -> Result<(), PoolError> {
    let heads = matrices.len();
    let inputs = x.chunks_exact(x.len() / heads);
    let outputs = out.chunks_exact_mut(out.len() / heads);
    let mut products: Vec<_> =
        matrices.iter().zip(inputs).zip(outputs).map(|((w, x), out)| Product { x, w, out }).collect();
    matmul_each(exec, &mut products)
}
