//! Indexer of attention: chooses the tokens that each row attends to (DeepSeek-V3.2, 2025).

use ferrule_kernels::indexer::{BlockScore, IndexShape, Selection, choose_tokens, mean_key};
use ferrule_kernels::kv::{KvRow, KvStore};
use ferrule_kernels::rope::{Rope, rope_in_place};
use ferrule_kernels::{PackedMatrix, PoolError, Rows, RowsMut, Scratch};
use serde::{Deserialize, Serialize};

use super::AttentionPass;
use crate::layer::{adapted, norm_heads};
use crate::limits::{SpecError, require, size};
use crate::memory::Place;
use crate::mixers::MixerPass;
use crate::rope::{RopeRows, RopeSpec};
use crate::spec::{NormSpec, check_norm};
use crate::weights::{Linear, LoadError, Loader, Norm, Packer, Tensors};

/// Choice of the tokens that a row attends to: a small key of each token is scored with queries of a few heads, and the
/// tokens with the highest scores are chosen, in blocks.
///
/// Queries are projected from the queries' latent if the attention has one, else from the input.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct IndexerSpec {
    /// Number of query heads.
    pub heads: usize,
    /// Length of a query head, and of the key, which all heads read.
    pub head_dim: usize,
    /// Way in which the heads choose.
    pub choice: IndexerChoice,
    /// Keys that are scored.
    #[serde(default)]
    pub keys: IndexerKeys,
    /// Number of consecutive tokens that are chosen together, counted from position 0.
    pub block: usize,
    /// Number of blocks that a row attends to.
    pub blocks: usize,
    /// Number of blocks up to that of the row that are always among them.
    pub local_blocks: usize,
    /// Norm of each query head.
    pub q_norm: Option<NormSpec>,
    /// Norm of the key.
    pub k_norm: Option<NormSpec>,
    /// Index of the rotary embedding of queries and keys in [`crate::ModelSpec::ropes`]; `None` for no rotation.
    pub rope: Option<usize>,
}

/// Way in which the heads of an indexer choose tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum IndexerChoice {
    /// One choice for all heads of keys and values: a score is the sum over heads of `weight * relu(query . key)`, and the
    /// weights are projected from the input.
    Together,
    /// One choice for all heads of keys and values: a score is the sum over heads of `relu(query . key)`.
    Sum,
    /// Each head chooses on its own, for an equal share of the heads of keys and values.
    EachHead,
}

/// Keys that an indexer scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum IndexerKeys {
    /// The key of each token; the score of a block is its highest.
    #[default]
    Tokens,
    /// The mean of the keys of a block, which is then normalized and rotated to the block's first position (Qwen4). The
    /// tokens of a block that is not complete are chosen besides the other blocks.
    BlockMeans,
}

/// Weights of an indexer.
pub(crate) struct Indexer<M = PackedMatrix> {
    /// Rows: the key; the weights of the heads if they choose together; all query heads unless they have a latent.
    input: Linear<M>,
    /// Projection from the queries' latent to all query heads.
    queries: Option<Linear<M>>,
    q_norm: Option<Norm>,
    k_norm: Option<Norm>,
}

/// Buffers of an indexer.
#[derive(Default)]
pub(super) struct Buffers {
    /// Outputs of the projections from the input: `[rows, width]`.
    input: Scratch<f32>,
    /// Queries that are projected from their latent: `[rows, heads * head_dim]`.
    queries: Scratch<f32>,
    /// Weights of 1 for the heads: `[rows, heads]`.
    ones: Scratch<f32>,
    blocks: BlockKeys,
}

/// Keys of the blocks that end in a batch.
#[derive(Default)]
struct BlockKeys {
    /// `[blocks, head_dim]`
    keys: Vec<f32>,
    /// Places of the blocks' last tokens.
    places: Vec<KvRow>,
    /// Angles of the blocks' first positions.
    angles: RopeRows,
}

impl IndexerSpec {
    /// Checks the numbers at `path`, for an attention with `kv_heads` heads of keys and values.
    pub(super) fn check(&self, path: &str, ropes: &[RopeSpec], kv_heads: usize) -> Result<(), SpecError> {
        let Self { heads, head_dim, block, blocks, local_blocks, .. } = *self;
        for (name, number) in [("heads", heads), ("head_dim", head_dim), ("block", block), ("blocks", blocks)] {
            size(&format!("{path}.{name}"), number)?;
        }
        size(&format!("{path}.heads * head_dim"), heads.saturating_mul(head_dim))?;
        require(&format!("{path}.local_blocks"), local_blocks, local_blocks <= blocks, || {
            format!("at most {path}.blocks ({blocks})")
        })?;
        require(&format!("{path}.heads"), heads, kv_heads.is_multiple_of(self.sets()), || {
            format!("a divisor of the heads of keys and values ({kv_heads}) where each head chooses")
        })?;
        check_norm(&format!("{path}.q_norm"), self.q_norm)?;
        check_norm(&format!("{path}.k_norm"), self.k_norm)?;
        let Some(rope) = self.rope else { return Ok(()) };
        let known = ropes.get(rope);
        require(&format!("{path}.rope"), rope, known.is_some(), || format!("below {}", ropes.len()))?;
        let depends = known.is_some_and(RopeSpec::depends_on_length) && self.keys == IndexerKeys::BlockMeans;
        require(&format!("{path}.rope"), rope, !depends, || {
            "one whose scaling does not depend on the length of the sequence, for the keys of blocks".to_owned()
        })?;
        let rotary_dim = known.map_or(0, |rope| rope.rotary_dim);
        require(&format!("ropes[{rope}].rotary_dim"), rotary_dim, rotary_dim <= head_dim, || {
            format!("at most {path}.head_dim ({head_dim})")
        })
    }

    /// Returns the number of choices of each row.
    pub(crate) fn sets(&self) -> usize {
        match self.choice {
            IndexerChoice::Together | IndexerChoice::Sum => 1,
            IndexerChoice::EachHead => self.heads,
        }
    }

    /// Returns the number of outputs of the projections from the input.
    fn input_rows(&self, has_latent: bool) -> usize {
        let weights = if self.choice == IndexerChoice::Together { self.heads } else { 0 };
        self.head_dim + weights + if has_latent { 0 } else { self.heads * self.head_dim }
    }

    /// Returns the floats per row in buffers, where the queries have a latent or not.
    pub(super) fn floats(&self, has_latent: bool) -> usize {
        let queries = if has_latent { self.heads * self.head_dim } else { 0 };
        let ones = if self.choice == IndexerChoice::Sum { self.heads } else { 0 };
        // Each row may end a block: decode rows of several sequences.
        let blocks = if self.keys == IndexerKeys::BlockMeans { self.head_dim } else { 0 };
        self.input_rows(has_latent) + queries + ones + blocks
    }

    /// Loads the weights for an input of `columns`, and a latent of the queries of `latent` columns if they have one.
    pub(super) fn load<P: Packer>(
        &self,
        loader: &Loader<'_>,
        packer: &mut P,
        (at, columns): (&str, usize),
        latent: Option<usize>,
    ) -> Result<Indexer<P::Matrix>, LoadError> {
        let Self { heads, head_dim, .. } = *self;
        let at = format!("{at}indexer.");
        // Small errors of scores choose other tokens, so these matrices have the format of values.
        let format = loader.values();
        let queries = ("q", heads * head_dim, format);
        let mut parts = vec![("k", head_dim, format)];
        if self.choice == IndexerChoice::Together {
            parts.push(("weights", heads, format));
        }
        if latent.is_none() {
            parts.push(queries);
        }
        let input = loader.linear(packer, &at, &parts, columns, false)?;
        let queries = latent.map(|columns| loader.linear(packer, &at, &[queries], columns, false)).transpose()?;
        let norm = |role: &str, norm| loader.optional_norm(&format!("{at}{role}"), norm, head_dim);
        Ok(Indexer { input, queries, q_norm: norm("q_norm", self.q_norm)?, k_norm: norm("k_norm", self.k_norm)? })
    }
}

impl<M> Indexer<M> {
    pub(super) fn list<'a>(&'a self, tensors: &mut Tensors<'a, M>) {
        tensors.linear(&self.input);
        self.queries.iter().for_each(|linear| tensors.linear(linear));
        self.q_norm.iter().chain(&self.k_norm).for_each(|norm| tensors.norm(norm));
    }
}

impl AttentionPass<'_> {
    /// Writes the keys of the indexer to their pages and chooses tokens for all rows, if the attention has an indexer.
    /// `latent` holds the queries' latent, if they have one.
    pub(super) fn choose(
        &self,
        store: &mut KvStore,
        selection: &mut Selection,
        x: &[f32],
        latent: Option<&[f32]>,
        Buffers { input, queries, ones, blocks: block_keys }: &mut Buffers,
    ) -> Result<(), PoolError> {
        let (Some(spec), Some(weights)) = (&self.spec.indexer, &self.weights.indexer) else { return Ok(()) };
        let (exec, rows, Place { group, index }) = (&self.pass.exec, self.pass.rows, self.pass.place());
        let IndexerSpec { heads, head_dim, block, blocks, local_blocks, rope, .. } = *spec;
        let width = spec.input_rows(latent.is_some());
        let input = input.take(rows.count * width);
        adapted(exec, &weights.input, self.pass.adapters, x, input)?;
        if spec.keys == IndexerKeys::Tokens {
            if let Some(norm) = &weights.k_norm {
                norm_heads(exec, norm, RowsMut::new(input, width, 0), 1, head_dim)?;
            }
            self.rotate(rope, RowsMut::new(input, width, 0), 1, head_dim)?;
        }
        store.write_index(exec.isa, index, &rows.places[group], Rows::new(input, width, 0));
        let score = match spec.keys {
            IndexerKeys::Tokens => BlockScore::Highest,
            IndexerKeys::BlockMeans => {
                self.write_block_keys(store, spec, weights, block_keys)?;
                BlockScore::Last
            }
        };

        let queries = match (&weights.queries, latent) {
            (Some(linear), Some(latent)) => {
                let queries = queries.take(rows.count * heads * head_dim);
                adapted(exec, linear, self.pass.adapters, latent, queries)?;
                self.normed_queries(weights, RowsMut::new(queries, heads * head_dim, 0))?;
                Rows::new(queries, heads * head_dim, 0)
            }
            _ => {
                let first = width - heads * head_dim;
                self.normed_queries(weights, RowsMut::new(input, width, first))?;
                Rows::new(input, width, first)
            }
        };
        let weights = match spec.choice {
            IndexerChoice::Together => Some(Rows::new(input, width, head_dim)),
            IndexerChoice::Sum => {
                let ones = ones.take(rows.count * heads);
                ones.fill(1.0);
                Some(Rows::new(ones, heads, 0))
            }
            IndexerChoice::EachHead => None,
        };
        let shape = IndexShape { heads, block, blocks, local_blocks, score };
        choose_tokens(exec, queries, weights, store, index, &shape, &rows.sequences[group], selection)
    }

    /// Replaces the stored key of the last token of each block that ends in the batch by the key of the block. The keys of
    /// the other tokens stay as they are until then, so a batch can be given again.
    fn write_block_keys(
        &self,
        store: &mut KvStore,
        spec: &IndexerSpec,
        weights: &Indexer,
        BlockKeys { keys, places, angles }: &mut BlockKeys,
    ) -> Result<(), PoolError> {
        let (MixerPass { exec, rows, .. }, Place { group, index }) = (self.pass, self.pass.place());
        let IndexerSpec { head_dim, block, .. } = *spec;
        let ends = rows.sequences[group].iter().flat_map(|sequence| {
            let tokens = (0..sequence.rows).map(|row| (sequence.first_row + row, sequence.first_position + row));
            tokens.filter(|(_, position)| (position + 1).is_multiple_of(block)).map(|token| (sequence.pages, token))
        });
        let ends: Vec<_> = ends.collect();
        keys.resize(ends.len() * head_dim, 0.0);
        places.clear();
        for ((pages, (row, position)), key) in ends.iter().zip(keys.chunks_exact_mut(head_dim)) {
            mean_key(exec.isa, store, index, pages, position + 1 - block..position + 1, key);
            places.push(rows.places[group][*row]);
        }
        if let Some(norm) = &weights.k_norm {
            norm_heads(exec, norm, RowsMut::new(keys, head_dim, 0), 1, head_dim)?;
        }
        if let Some(rope) = spec.rope {
            let rope = &self.pass.ropes[rope];
            angles.fill(rope, ends.iter().map(|(_, (_, position))| (position + 1 - block, 0)));
            let (RopeSpec { rotary_dim, interleaved, .. }, RopeRows { cos, sin }) = (rope, &*angles);
            let (rotary_dim, interleaved) = (*rotary_dim, *interleaved);
            let rope = Rope { heads: 1, head_dim, first: 0, rotary_dim, interleaved, cos, sin };
            rope_in_place(exec, RowsMut::new(keys, head_dim, 0), &rope)?;
        }
        store.write_index(exec.isa, index, places, Rows::new(keys, head_dim, 0));
        Ok(())
    }

    /// Normalizes and rotates the queries of the indexer.
    fn normed_queries(&self, weights: &Indexer, queries: RowsMut<'_>) -> Result<(), PoolError> {
        let Some(IndexerSpec { heads, head_dim, rope, .. }) = self.spec.indexer else { return Ok(()) };
        let RowsMut { data, stride, first } = queries;
        if let Some(norm) = &weights.q_norm {
            norm_heads(&self.pass.exec, norm, RowsMut::new(data, stride, first), heads, head_dim)?;
        }
        self.rotate(rope, RowsMut::new(data, stride, first), heads, head_dim)
    }
}
