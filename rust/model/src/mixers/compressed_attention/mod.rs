//! Attention to a window of tokens and to compressed entries (DeepSeek-V4, DeepSeek-AI 2026).
//!
//! One vector per token is key and value of all heads. An entry is such a vector for a block of tokens: their mean, weighted
//! by a softmax for each element. A row attends to the tokens of its window and to the entries of the complete blocks, or
//! those that an indexer chooses, in one softmax. Its output is rotated back, and projected in two steps, of which the
//! first is apart for each group of heads.
//!
//! Vectors of tokens are in pages with the window, entries and the indexer's keys in pages without one, and what an
//! incomplete block has so far is state. All are f32.

mod compressor;

use ferrule_kernels::entries::{
    Entries, EntryAttention, EntryBuffers, EntryChoice, EntryIndex, PagedRows, attend_entries, attention_bytes,
    buffer_bytes, choose_entries, rows_per_page,
};
use ferrule_kernels::kv::{KvRow, PAGE_TOKENS};
use ferrule_kernels::rope::{Rope, rope_in_place};
use ferrule_kernels::{PackedMatrix, PoolError, Rows, RowsMut, Scratch};
use serde::{Deserialize, Serialize};

use super::{At, Mixer, MixerPass};
use crate::layer::{adapted, adapted_output, for_rows, norm_heads};
use crate::limits::{SpecError, finite, require, size};
use crate::memory::{Memory, MemoryNeed, Place};
use crate::rope::{RopeRows, RopeSpec};
use crate::spec::{NormSpec, check_norm};
use crate::weights::{Linear, LoadError, Loader, Norm, Packer, RolePart, Tensors};
use compressor::{Compressor, Pooling};

/// Attention to a window of tokens and to compressed entries.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CompressedAttentionSpec {
    /// Number of query heads.
    pub heads: usize,
    /// Length of a query head, and of the vectors that all heads read.
    pub head_dim: usize,
    /// Factor on scores.
    pub scale: f32,
    /// Number of tokens up to its own that a row attends to.
    pub window: usize,
    /// Rank of the queries' latent.
    pub query_rank: usize,
    /// Norm of the queries' latent, and of vectors.
    pub norm: NormSpec,
    /// Norm of each query head.
    pub query_norm: NormSpec,
    /// Index of the rotary embedding in [`crate::ModelSpec::ropes`], which rotates the last elements of heads and vectors.
    pub rope: usize,
    /// Number of groups of consecutive heads, whose outputs are projected apart.
    pub output_groups: usize,
    /// Rank of the output of a group.
    pub output_rank: usize,
    /// Compression of tokens to entries; `None` for attention to the window only.
    pub compression: Option<CompressionSpec>,
}

/// Compression of blocks of tokens to entries.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CompressionSpec {
    /// Number of tokens of a block, counted from position 0: a divisor or a multiple of the tokens of a page (16).
    pub block: usize,
    /// Whether an entry also has the tokens of the block before.
    pub overlap: bool,
    /// Choice of the entries that a row attends to; `None` for all of them.
    pub indexer: Option<EntryIndexerSpec>,
}

/// Choice of entries: each has a small key, compressed like the entry, which is scored with queries of a few heads from the
/// queries' latent. A score is the sum over heads of `weight * relu(query . key)`; the weights are projected from the
/// input.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct EntryIndexerSpec {
    /// Number of query heads.
    pub heads: usize,
    /// Length of a query head, and of a key.
    pub head_dim: usize,
    /// Number of entries that a row attends to.
    pub entries: usize,
}

/// Weights of attention to compressed entries.
pub(crate) struct CompressedAttention<M = PackedMatrix> {
    /// Rows: the queries' latent; the vector of the token; then those of [`CompressedAttentionSpec::input_parts`].
    input: Linear<M>,
    query_latent_norm: Norm,
    queries: Linear<M>,
    query_norm: Norm,
    vector_norm: Norm,
    compressor: Option<Compressor>,
    indexer: Option<Indexer<M>>,
    sinks: Vec<f32>,
    /// One for each group of heads.
    groups: Vec<Linear<M>>,
    output: Linear<M>,
}

/// Weights of an indexer of entries.
struct Indexer<M> {
    queries: Linear<M>,
    compressor: Compressor,
}

/// Buffers of attention to compressed entries. Shapes: `[rows, width]`.
#[derive(Default)]
pub(crate) struct Buffers {
    /// Outputs of the projections from the input.
    input: Scratch<f32>,
    latent: Scratch<f32>,
    queries: Scratch<f32>,
    index_queries: Scratch<f32>,
    mixed: Scratch<f32>,
    /// Outputs of attention, then those of their first projection, of one group.
    group: [Scratch<f32>; 2],
    /// Outputs of the first projection of all groups.
    low: Scratch<f32>,
    compressor: compressor::Buffers,
    choice: EntryChoice,
    attended: EntryBuffers,
    /// Negated sines of the rows.
    back: Vec<f32>,
}

/// Columns of the projections from the input.
struct Columns {
    /// Outputs for the compressor of entries: values, then gates.
    compressor: usize,
    /// Outputs for the compressor of keys: values, then gates.
    indexer: usize,
    /// Weights of the indexer's heads.
    weights: usize,
    all: usize,
}

impl CompressionSpec {
    fn check(&self, path: &str, rotary_dim: usize) -> Result<(), SpecError> {
        let block = self.block;
        size(&format!("{path}.block"), block)?;
        let fits = PAGE_TOKENS.is_multiple_of(block) || block.is_multiple_of(PAGE_TOKENS);
        require(&format!("{path}.block"), block, fits, || format!("a divisor or a multiple of {PAGE_TOKENS}"))?;
        let Some(EntryIndexerSpec { heads, head_dim, entries }) = self.indexer else { return Ok(()) };
        let path = format!("{path}.indexer");
        for (name, number) in [("heads", heads), ("head_dim", head_dim), ("entries", entries)] {
            size(&format!("{path}.{name}"), number)?;
        }
        size(&format!("{path}.heads * head_dim"), heads.saturating_mul(head_dim))?;
        require(&format!("{path}.head_dim"), head_dim, rotary_dim <= head_dim, || {
            format!("at least the rotary_dim of the rotary embedding ({rotary_dim})")
        })
    }

    /// Returns the pooling of vectors of `dim` elements.
    fn pooling(&self, dim: usize) -> Pooling {
        Pooling { dim, block: self.block, overlap: self.overlap }
    }
}

impl CompressedAttentionSpec {
    /// Returns the poolings of entries and of the indexer's keys.
    fn poolings(&self) -> [Option<Pooling>; 2] {
        let compression = self.compression.as_ref();
        let indexer = compression.and_then(|compression| Some((compression, compression.indexer.as_ref()?)));
        [
            compression.map(|compression| compression.pooling(self.head_dim)),
            indexer.map(|(compression, indexer)| compression.pooling(indexer.head_dim)),
        ]
    }

    fn indexer(&self) -> Option<&EntryIndexerSpec> {
        self.compression.as_ref()?.indexer.as_ref()
    }

    /// Returns the roles and numbers of outputs of the projections from the input, in order.
    fn input_parts(&self, loader: &Loader<'_>) -> Vec<RolePart<'static>> {
        let [entries, keys] = self.poolings();
        let mut parts = vec![("q_a", self.query_rank, loader.usual()), ("kv", self.head_dim, loader.values())];
        let mut pooled = |values, gates, pooling: Option<Pooling>| {
            parts.extend(
                pooling
                    .into_iter()
                    .flat_map(|pooling| [values, gates].map(|role| (role, pooling.columns(), loader.values()))),
            );
        };
        pooled("compressor.values", "compressor.gates", entries);
        pooled("indexer.values", "indexer.gates", keys);
        parts.extend(self.indexer().map(|indexer| ("indexer.weights", indexer.heads, loader.values())));
        parts
    }

    fn columns(&self) -> Columns {
        let compressor = self.query_rank + self.head_dim;
        let [entries, keys] = self.poolings().map(|pooling| pooling.map_or(0, |pooling| 2 * pooling.columns()));
        let (indexer, weights) = (compressor + entries, compressor + entries + keys);
        Columns { compressor, indexer, weights, all: weights + self.indexer().map_or(0, |indexer| indexer.heads) }
    }

    /// Returns the floats of a page of entries, and of the keys after them.
    fn entry_floats(&self) -> [usize; 2] {
        self.poolings().map(|pooling| pooling.map_or(0, |pooling| rows_per_page(pooling.block) * pooling.dim))
    }

    /// Returns the number of outputs of the heads of a group.
    fn group_columns(&self) -> usize {
        self.heads / self.output_groups * self.head_dim
    }
}

impl Mixer for CompressedAttentionSpec {
    type Weights<M> = CompressedAttention<M>;
    type Buffers = Buffers;

    fn check(&self, path: &str, ropes: &[RopeSpec], _: usize) -> Result<(), SpecError> {
        let Self { heads, head_dim, window, query_rank, output_groups, output_rank, rope, .. } = *self;
        for (name, number) in [
            ("heads", heads),
            ("head_dim", head_dim),
            ("window", window),
            ("query_rank", query_rank),
            ("output_groups", output_groups),
            ("output_rank", output_rank),
        ] {
            size(&format!("{path}.{name}"), number)?;
        }
        size(&format!("{path}.heads * head_dim"), heads.saturating_mul(head_dim))?;
        size(&format!("{path}.output_groups * output_rank"), output_groups.saturating_mul(output_rank))?;
        finite(&format!("{path}.scale"), self.scale)?;
        check_norm(&format!("{path}.norm"), Some(self.norm))?;
        check_norm(&format!("{path}.query_norm"), Some(self.query_norm))?;
        require(&format!("{path}.output_groups"), output_groups, heads.is_multiple_of(output_groups), || {
            format!("a divisor of heads ({heads})")
        })?;
        let known = ropes.get(rope);
        require(&format!("{path}.rope"), rope, known.is_some(), || format!("below {}", ropes.len()))?;
        require(&format!("{path}.rope"), rope, !known.is_some_and(RopeSpec::depends_on_length), || {
            "one whose scaling does not depend on the length of the sequence".to_owned()
        })?;
        let rotary_dim = known.map_or(0, |rope| rope.rotary_dim);
        require(&format!("ropes[{rope}].rotary_dim"), rotary_dim, rotary_dim <= head_dim, || {
            format!("at most {path}.head_dim ({head_dim})")
        })?;
        let compression = self.compression.as_ref();
        compression.map_or(Ok(()), |compression| compression.check(&format!("{path}.compression"), rotary_dim))
    }

    fn load<P: Packer>(
        &self,
        loader: &Loader<'_>,
        packer: &mut P,
        At { prefix: at, columns, .. }: At<'_>,
    ) -> Result<CompressedAttention<P::Matrix>, LoadError> {
        let Self { heads, head_dim, query_rank, output_groups, output_rank, norm, .. } = *self;
        let (usual, [entries, keys]) = (loader.usual(), self.poolings());
        let input = loader.linear(packer, at, &self.input_parts(loader), columns, false)?;
        let queries = loader.linear(packer, at, &[("q_b", heads * head_dim, usual)], query_rank, false)?;
        let indexer = match (self.indexer(), keys) {
            (Some(EntryIndexerSpec { heads, head_dim, .. }), Some(pooling)) => {
                let at = format!("{at}indexer.");
                // Small errors of scores choose other entries, so this matrix has the format of values.
                let queries = [("q", heads * head_dim, loader.values())];
                Some(Indexer {
                    queries: loader.linear(packer, &at, &queries, query_rank, false)?,
                    compressor: pooling.load(loader, &at, norm)?,
                })
            }
            _ => None,
        };
        let groups = (0..output_groups).map(|group| {
            let role = format!("output_{group}");
            loader.linear(packer, at, &[(&role, output_rank, usual)], self.group_columns(), false)
        });
        let groups = groups.collect::<Result<_, _>>()?;
        let output = [("output", loader.hidden_size(), usual)];
        Ok(CompressedAttention {
            input,
            query_latent_norm: loader.norm(&format!("{at}q_a_norm"), norm, query_rank)?,
            queries,
            query_norm: loader.norm(&format!("{at}q_norm"), self.query_norm, head_dim)?,
            vector_norm: loader.norm(&format!("{at}kv_norm"), norm, head_dim)?,
            compressor: entries.map(|pooling| pooling.load(loader, &format!("{at}compressor."), norm)).transpose()?,
            indexer,
            sinks: loader.vector(&format!("{at}sinks.weight"), heads)?,
            groups,
            output: loader.linear(packer, at, &output, output_groups * output_rank, false)?,
        })
    }

    fn list<'a, M>(weights: &'a CompressedAttention<M>, tensors: &mut Tensors<'a, M>) {
        let CompressedAttention {
            input,
            query_latent_norm,
            queries,
            query_norm,
            vector_norm,
            compressor,
            indexer,
            sinks,
            groups,
            output,
        } = weights;
        [input, queries].into_iter().for_each(|linear| tensors.linear(linear));
        [query_latent_norm, query_norm, vector_norm].into_iter().for_each(|norm| tensors.norm(norm));
        compressor.iter().for_each(|compressor| compressor.list(tensors));
        indexer.iter().for_each(|Indexer { queries, compressor }| {
            tensors.linear(queries);
            compressor.list(tensors);
        });
        tensors.vectors.push(sinks);
        groups.iter().chain([output]).for_each(|linear| tensors.linear(linear));
    }

    /// Vectors of tokens; then, if there are entries, those with the keys, and what incomplete blocks have so far.
    fn memory(&self) -> Vec<MemoryNeed> {
        let floats = PAGE_TOKENS * self.head_dim;
        let mut needs = vec![MemoryNeed::Floats { floats, window: Some(self.window) }];
        if self.compression.is_some() {
            needs.push(MemoryNeed::Floats { floats: self.entry_floats().iter().sum(), window: None });
            let floats = self.poolings().iter().flatten().map(Pooling::state_len).sum();
            needs.push(MemoryNeed::State { floats });
        }
        needs
    }

    fn buffer_floats(&self, _: usize, rows: usize) -> usize {
        let heads = self.heads * self.head_dim;
        let groups = self.group_columns() + self.output_rank + self.output_groups * self.output_rank;
        let index_queries = self.indexer().map_or(0, |indexer| indexer.heads * indexer.head_dim);
        // Means and, for rows that end a block, entries.
        let pooled: usize = self.poolings().iter().flatten().map(|pooling| 2 * pooling.dim).sum();
        rows * (self.columns().all + self.query_rank + 2 * heads + index_queries + groups + pooled + self.head_dim)
    }

    fn choice_bytes(&self, rows: usize, tokens: usize) -> u64 {
        let entries = if self.compression.is_some() { tokens / self.block() } else { 0 };
        let chosen = self.indexer().map_or(entries, |indexer| indexer.entries.min(entries));
        let choice = self.indexer().map_or(0, |indexer| buffer_bytes(rows, indexer.entries, entries));
        choice.saturating_add(attention_bytes(rows, self.heads, self.window.min(tokens).saturating_add(chosen)))
    }

    fn longest_input(&self, hidden_size: usize) -> usize {
        let inputs = [self.query_rank, self.group_columns(), self.output_groups * self.output_rank];
        inputs.into_iter().fold(hidden_size, usize::max)
    }

    /// Writes own vectors and entries to their pages first and reads them from there.
    fn run(
        &self,
        weights: &CompressedAttention,
        pass: &MixerPass<'_>,
        memory: &mut Memory,
        x: &[f32],
        buffers: &mut Buffers,
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        let Self { heads, head_dim, query_rank, .. } = *self;
        let (exec, rows, tokens) = (&pass.exec, pass.rows.count, pass.places[0]);
        let columns = self.columns();
        let RopeRows { cos, sin } = &pass.rows.ropes[self.rope];
        let Buffers { input, latent, queries, index_queries, mixed, group, low, compressor, choice, attended, back } =
            buffers;

        let input = input.take(rows * columns.all);
        adapted(exec, &weights.input, pass.adapters, x, input)?;
        let latent = latent.take(rows * query_rank);
        for_rows(exec, rows, latent, query_rank, |row, latent| {
            latent.copy_from_slice(&input[row * columns.all..][..query_rank]);
        })?;
        norm_heads(exec, &weights.query_latent_norm, RowsMut::new(latent, query_rank, 0), 1, query_rank)?;
        let queries = queries.take(rows * heads * head_dim);
        adapted(exec, &weights.queries, pass.adapters, latent, queries)?;
        norm_heads(exec, &weights.query_norm, RowsMut::new(queries, heads * head_dim, 0), heads, head_dim)?;
        self.rotate(pass, RowsMut::new(queries, heads * head_dim, 0), (heads, head_dim), cos, sin)?;
        norm_heads(exec, &weights.vector_norm, RowsMut::new(input, columns.all, query_rank), 1, head_dim)?;
        self.rotate(pass, RowsMut::new(input, columns.all, query_rank), (1, head_dim), cos, sin)?;
        let vectors = input.chunks_exact(columns.all).map(|row| &row[query_rank..][..head_dim]);
        write_rows(memory.floats_mut(tokens), pass.rows.places[tokens.group].iter().copied(), vectors, 1);

        self.compress(weights, pass, memory, (input, &columns), compressor)?;
        if let (Some(spec), Some(indexer)) = (self.indexer(), &weights.indexer) {
            let EntryIndexerSpec { heads, head_dim, entries: count } = *spec;
            let queries = index_queries.take(rows * heads * head_dim);
            adapted(exec, &indexer.queries, pass.adapters, latent, queries)?;
            self.rotate(pass, RowsMut::new(queries, heads * head_dim, 0), (heads, head_dim), cos, sin)?;
            let place = self.keys_place(pass);
            let keys = PagedRows { pages: memory.floats(place), dim: head_dim, block: self.block() };
            let (queries, input) = (Rows::new(queries, heads * head_dim, 0), Rows::new(input, columns.all, 0));
            let weights = Rows { first: columns.weights, ..input };
            let index = EntryIndex { heads, keys, count };
            choose_entries(exec, queries, weights, &index, &pass.rows.sequences[place.group], choice)?;
        }

        let mixed = mixed.take(rows * heads * head_dim);
        let entries = pass.places.get(1).map(|&place| Entries {
            rows: PagedRows { pages: memory.floats(place), dim: head_dim, block: self.block() },
            sequences: &pass.rows.sequences[place.group],
            choice: self.indexer().map(|_| &*choice),
        });
        let attention = EntryAttention {
            heads,
            scale: self.scale,
            window: self.window,
            sinks: &weights.sinks,
            tokens: PagedRows { pages: memory.floats(tokens), dim: head_dim, block: 1 },
            entries,
        };
        let queries = Rows::new(queries, heads * head_dim, 0);
        attend_entries(exec, queries, &attention, &pass.rows.sequences[tokens.group], attended, mixed)?;
        back.clear();
        back.extend(sin.iter().map(|sin| -sin));
        self.rotate(pass, RowsMut::new(mixed, heads * head_dim, 0), (heads, head_dim), cos, back)?;
        self.project(weights, pass, mixed, group, low, out)
    }
}

impl CompressedAttentionSpec {
    /// Returns the number of tokens that an entry stands for.
    fn block(&self) -> usize {
        self.compression.as_ref().map_or(1, |compression| compression.block)
    }

    /// Returns the place of the indexer's keys, which are after the entries of a page.
    fn keys_place(&self, pass: &MixerPass<'_>) -> Place {
        let Place { group, index } = pass.places[1];
        Place { group, index: index + self.entry_floats()[0] }
    }

    /// Rotates the last elements of each of some heads by the angles of its row.
    fn rotate(
        &self,
        pass: &MixerPass<'_>,
        x: RowsMut<'_>,
        (heads, head_dim): (usize, usize),
        cos: &[f32],
        sin: &[f32],
    ) -> Result<(), PoolError> {
        let RopeSpec { rotary_dim, interleaved, .. } = pass.ropes[self.rope];
        let rope = Rope { heads, head_dim, first: head_dim - rotary_dim, rotary_dim, interleaved, cos, sin };
        rope_in_place(&pass.exec, x, &rope)
    }

    /// Writes the entries and keys of the blocks that end in the batch to their pages, and the states after it.
    fn compress(
        &self,
        weights: &CompressedAttention,
        pass: &MixerPass<'_>,
        memory: &mut Memory,
        (input, columns): (&[f32], &Columns),
        buffers: &mut compressor::Buffers,
    ) -> Result<(), PoolError> {
        let &[_, entries, state] = pass.places else { return Ok(()) };
        let at_input = |first| Rows::new(input, columns.all, first);
        let compressors = [
            (weights.compressor.as_ref(), columns.compressor, entries),
            (weights.indexer.as_ref().map(|indexer| &indexer.compressor), columns.indexer, self.keys_place(pass)),
        ];
        let mut state = state;
        for (compressor, first, place) in compressors {
            let Some(compressor) = compressor else { continue };
            let gates = first + compressor.pooling.columns();
            compressor.run(pass, memory, self.rope, [first, gates].map(at_input), [state, place], buffers)?;
            state.index += compressor.pooling.state_len();
        }
        Ok(())
    }

    /// Projects the outputs of the heads, `mixed: [rows, heads * head_dim]`, first apart for each group of heads.
    fn project(
        &self,
        weights: &CompressedAttention,
        pass: &MixerPass<'_>,
        mixed: &[f32],
        [group_in, group_out]: &mut [Scratch<f32>; 2],
        low: &mut Scratch<f32>,
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        let (exec, rows) = (&pass.exec, pass.rows.count);
        let (heads, group, rank) = (self.heads * self.head_dim, self.group_columns(), self.output_rank);
        let all = self.output_groups * rank;
        let low = low.take(rows * all);
        for (number, linear) in weights.groups.iter().enumerate() {
            let (x, y) = (group_in.take(rows * group), group_out.take(rows * rank));
            for_rows(exec, rows, x, group, |row, x| {
                x.copy_from_slice(&mixed[row * heads + number * group..][..group]);
            })?;
            adapted(exec, linear, pass.adapters, x, y)?;
            for (row, y) in low.chunks_exact_mut(all).zip(y.chunks_exact(rank)) {
                row[number * rank..][..rank].copy_from_slice(y);
            }
        }
        adapted_output(exec, &weights.output, pass.adapters, low, out)
    }
}

/// Writes a vector for each of `places`, which are those of the last tokens of its block, to pages.
fn write_rows<'a>(
    RowsMut { data, stride, first }: RowsMut<'_>,
    places: impl IntoIterator<Item = KvRow>,
    rows: impl Iterator<Item = &'a [f32]>,
    block: usize,
) {
    for (KvRow { page, slot }, row) in places.into_iter().zip(rows) {
        let at = page as usize * stride + first + slot / block * row.len();
        data[at..at + row.len()].copy_from_slice(row);
    }
}
