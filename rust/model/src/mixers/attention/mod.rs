//! Softmax attention: multi-head with grouped keys and values (MHA, GQA, MQA), or multi-head latent (MLA).

mod heads;
mod indexer;
mod latent;

use ferrule_kernels::activation::{Activation, activate, apply_gate};
use ferrule_kernels::attention::{AttentionShape, attention};
use ferrule_kernels::elementwise::scale_rows;
use ferrule_kernels::indexer::{Selection, buffer_bytes};
use ferrule_kernels::kv::{KvShape, KvStore};
use ferrule_kernels::rope::{Rope, rope_in_place};
use ferrule_kernels::{PackedMatrix, PoolError, Rows, RowsMut, Scratch};
use serde::{Deserialize, Serialize};

use super::{At, Mixer, MixerPass};
use crate::layer::{adapted, adapted_output, for_rows, gather_columns, norm_in_place};
use crate::limits::{SpecError, finite, positive, require, size};
use crate::memory::{Memory, MemoryNeed, Place};
use crate::rope::{RopeRows, RopeSpec};
use crate::spec::{NormSpec, check_norm};
use crate::stage::TensorParallelGroup;
use crate::weights::{Linear, LoadError, Loader, Norm, Packer, Tensors};
pub use heads::HeadProjections;
use heads::Heads;
use indexer::Indexer;
pub use indexer::{IndexerChoice, IndexerKeys, IndexerSpec};
use latent::Latent;
pub use latent::LatentProjections;

/// Softmax attention.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionSpec {
    /// Number of query heads.
    pub heads: usize,
    /// Factor on scores, mostly `1 / sqrt(key_dim)`.
    pub scale: f32,
    /// Projections to queries, keys and values.
    pub projections: ProjectionsSpec,
    /// Whether the output projection adds a bias.
    pub output_bias: bool,
    /// Index of the rotary embedding in [`crate::ModelSpec::ropes`]; `None` for no rotation.
    pub rope: Option<usize>,
    /// Sliding window: number of positions that a row attends to, including its own; `None` for all. In bidirectional
    /// attention, that many on either side.
    pub window: Option<usize>,
    /// Chunked attention: a row attends to no position before the last multiple of this number; `None` for all.
    pub chunk: Option<usize>,
    /// Growth of queries with their position.
    pub query_growth: Option<QueryGrowth>,
    /// Norm of the heads' outputs, over all heads, before the output projection.
    pub output_norm: Option<NormSpec>,
    /// Soft cap on scores: `s` becomes `softcap * tanh(s / softcap)`.
    pub softcap: Option<f32>,
    /// ALiBi: for each head, the factor on the distance between positions (Press et al. 2022).
    pub alibi_slopes: Option<Vec<f32>>,
    /// Attention sinks: whether each head has a learned logit that takes part in the softmax and adds no value.
    pub sinks: bool,
    /// Gate of the output before its projection: the sigmoid of a projection of the input.
    pub output_gate: Option<OutputGate>,
    /// Whether the projection to the gate adds a bias.
    #[serde(default)]
    pub gate_bias: bool,
    /// Index of the earlier layer whose keys and values are read; there are only queries then. `None` for own keys and
    /// values.
    pub kv_layer: Option<usize>,
    /// Choice of the tokens that a row attends to; `None` for all of them, or those that `selection_layer` chose.
    pub indexer: Option<IndexerSpec>,
    /// Index of the last layer before this one that has an indexer, whose choice is reused.
    pub selection_layer: Option<usize>,
}

/// Unit of attention's output that has its own gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputGate {
    /// Each element of each head.
    Elements,
    /// Each head.
    Heads,
}

/// Growth of queries (Llama 4, 2025): the factor at position p is `1 + beta * ln(1 + floor((p + offset) / length))`.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct QueryGrowth {
    /// Factor of the logarithm.
    pub beta: f32,
    /// Number of positions with the same factor.
    pub length: usize,
    /// Number added to positions.
    pub offset: usize,
}

impl QueryGrowth {
    /// Returns the factor on the query at a position.
    fn factor(self, position: usize) -> f32 {
        let steps = (position + self.offset) / self.length;
        (1.0 + f64::from(self.beta) * (steps as f64).ln_1p()) as f32
    }
}

/// Projections to queries, keys and values.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ProjectionsSpec {
    /// Queries, keys and values are projected from the input.
    Heads(HeadProjections),
    /// Keys and values are projected from one latent vector (MLA; DeepSeek-V2, 2024).
    Latent(LatentProjections),
}

/// Weights of attention. Projections that share an input are stacked in one matrix.
pub(crate) struct Attention<M = PackedMatrix> {
    projections: Projections<M>,
    output: Linear<M>,
    output_gate: Option<Linear<M>>,
    indexer: Option<Indexer<M>>,
    /// Norm of the output projection's input.
    output_norm: Option<Norm>,
    /// Attention sinks: one logit per head.
    sinks: Option<Vec<f32>>,
}

enum Projections<M> {
    Heads(Heads<M>),
    Latent(Latent<M>),
}

/// Buffers of attention. Shapes: `[rows, width]`.
#[derive(Default)]
pub(crate) struct Buffers {
    inner: InnerBuffers,
    /// Gates of the output.
    gates: Scratch<f32>,
}

/// Buffers of projections and scores.
#[derive(Default)]
struct InnerBuffers {
    /// Outputs of the projections from the mixer's input.
    qkv: Scratch<f32>,
    /// Values that are copies of the keys.
    values: Scratch<f32>,
    /// Outputs of attention.
    mixed: Scratch<f32>,
    latent: latent::Buffers,
    indexer: indexer::Buffers,
}

impl AttentionSpec {
    /// Returns the number of inputs of the output projection.
    fn output_columns(&self) -> usize {
        match &self.projections {
            ProjectionsSpec::Heads(HeadProjections { value_dim, .. })
            | ProjectionsSpec::Latent(LatentProjections { value_dim, .. }) => self.heads * value_dim,
        }
    }

    /// Returns the number of heads of keys and values.
    pub(crate) fn kv_heads(&self) -> usize {
        match &self.projections {
            ProjectionsSpec::Heads(heads) => heads.kv_heads,
            ProjectionsSpec::Latent(_) => 1,
        }
    }

    /// Returns the rank of the queries' latent, if they have one.
    fn query_rank(&self) -> Option<usize> {
        match &self.projections {
            ProjectionsSpec::Heads(_) => None,
            ProjectionsSpec::Latent(latent) => latent.query_rank,
        }
    }

    /// Checks the choice of tokens, which takes the place of other limits to what a row attends to.
    fn check_choice(&self, path: &str, ropes: &[RopeSpec]) -> Result<(), SpecError> {
        if let Some(indexer) = &self.indexer {
            indexer.check(&format!("{path}.indexer"), ropes, self.kv_heads())?;
        }
        let chooses = self.indexer.is_some() || self.selection_layer.is_some();
        for (name, given) in [
            ("window", self.window.is_some()),
            ("chunk", self.chunk.is_some()),
            ("alibi_slopes", self.alibi_slopes.is_some()),
            ("kv_layer", self.kv_layer.is_some()),
        ] {
            require(&format!("{path}.{name}"), given, !(given && chooses), || {
                "null where an indexer chooses tokens".to_owned()
            })?;
        }
        let both = self.indexer.is_some() && self.selection_layer.is_some();
        require(&format!("{path}.selection_layer"), both, !both, || "null for a layer with an indexer".to_owned())
    }

    /// Returns the number of gates of the output.
    fn gates(&self) -> usize {
        match self.output_gate {
            None => 0,
            Some(OutputGate::Elements) => self.output_columns(),
            Some(OutputGate::Heads) => self.heads,
        }
    }
}

impl Mixer for AttentionSpec {
    type Weights<M> = Attention<M>;
    type Buffers = Buffers;

    fn check(&self, path: &str, ropes: &[RopeSpec], _: usize) -> Result<(), SpecError> {
        size(&format!("{path}.heads"), self.heads)?;
        finite(&format!("{path}.scale"), self.scale)?;
        positive(&format!("{path}.softcap"), self.softcap)?;
        if let Some(window) = self.window {
            size(&format!("{path}.window"), window)?;
        }
        if let Some(chunk) = self.chunk {
            size(&format!("{path}.chunk"), chunk)?;
        }
        if let Some(QueryGrowth { beta, length, offset }) = self.query_growth {
            let path = format!("{path}.query_growth");
            finite(&format!("{path}.beta"), beta)?;
            size(&format!("{path}.length"), length)?;
            size(&format!("{path}.offset + 1"), offset.saturating_add(1))?;
        }
        check_norm(&format!("{path}.output_norm"), self.output_norm)?;
        if let Some(slopes) = &self.alibi_slopes {
            let fits = slopes.len() == self.heads && slopes.iter().all(|slope| slope.is_finite());
            require(&format!("{path}.alibi_slopes (their number)"), slopes.len(), fits, || {
                format!("that of the heads ({}), each one finite", self.heads)
            })?;
        }
        self.check_choice(path, ropes)?;
        let (rotated, within) = match &self.projections {
            ProjectionsSpec::Heads(heads) => {
                heads.check(path, self.heads, self.kv_layer.is_some())?;
                (heads.key_dim, "key_dim")
            }
            ProjectionsSpec::Latent(latent) => {
                let own = self.kv_layer.is_none();
                require(&format!("{path}.kv_layer"), self.kv_layer.unwrap_or(0), own, || {
                    "null for latent projections".to_owned()
                })?;
                latent.check(path, self.heads)?;
                (latent.rope_dim, "rope_dim")
            }
        };
        if let Some(rope) = self.rope {
            let known = ropes.get(rope);
            require(&format!("{path}.rope"), rope, known.is_some(), || format!("below {}", ropes.len()))?;
            let rotary_dim = known.map_or(0, |rope| rope.rotary_dim);
            require(&format!("ropes[{rope}].rotary_dim"), rotary_dim, rotary_dim <= rotated, || {
                format!("at most {path}.projections.{within} ({rotated})")
            })?;
        }
        Ok(())
    }

    fn load<P: Packer>(
        &self,
        loader: &Loader<'_>,
        packer: &mut P,
        At { prefix: at, columns, .. }: At<'_>,
    ) -> Result<Attention<P::Matrix>, LoadError> {
        let projections = match &self.projections {
            ProjectionsSpec::Heads(heads) => {
                Projections::Heads(heads.load(loader, packer, (at, columns), self.heads, self.kv_layer.is_some())?)
            }
            ProjectionsSpec::Latent(latent) => Projections::Latent(latent.load(loader, packer, at, self.heads)?),
        };
        let output = [("output", loader.hidden_size(), loader.usual())];
        let output = loader.linear(packer, at, &output, self.output_columns(), self.output_bias)?;
        let output_gate = match self.gates() {
            0 => None,
            gates => Some(loader.linear(packer, at, &[("gate", gates, loader.usual())], columns, self.gate_bias)?),
        };
        let indexer = match &self.indexer {
            Some(indexer) => Some(indexer.load(loader, packer, (at, columns), self.query_rank())?),
            None => None,
        };
        let sinks = match self.sinks {
            true => Some(loader.vector(&format!("{at}sinks.weight"), self.heads)?),
            false => None,
        };
        let output_norm = loader.optional_norm(&format!("{at}output_norm"), self.output_norm, self.output_columns())?;
        Ok(Attention { projections, output, output_gate, indexer, output_norm, sinks })
    }

    fn reads_any_width(&self) -> bool {
        matches!(self.projections, ProjectionsSpec::Heads(_))
    }

    fn list<'a, M>(weights: &'a Attention<M>, tensors: &mut Tensors<'a, M>) {
        match &weights.projections {
            Projections::Heads(heads) => heads.list(tensors),
            Projections::Latent(latent) => latent.list(tensors),
        }
        tensors.linear(&weights.output);
        weights.output_gate.iter().for_each(|gate| tensors.linear(gate));
        weights.indexer.iter().for_each(|indexer| indexer.list(tensors));
        weights.output_norm.iter().for_each(|norm| tensors.norm(norm));
        tensors.vectors.extend(&weights.sinks);
    }

    fn memory(&self) -> Vec<MemoryNeed> {
        let shape = match &self.projections {
            ProjectionsSpec::Heads(heads) => heads.kv_shape(),
            ProjectionsSpec::Latent(latent) => latent.kv_shape(),
        };
        let shape = KvShape { index_dim: self.indexer.as_ref().map_or(0, |indexer| indexer.head_dim), ..shape };
        // No row reads tokens further back than a chunk is long.
        let window = self.window.into_iter().chain(self.chunk).min();
        vec![match self.kv_layer {
            None => MemoryNeed::Pages { shape, window },
            Some(layer) => MemoryNeed::PagesOf { layer, shape, window },
        }]
    }

    fn buffer_floats(&self, _: usize, rows: usize) -> usize {
        let inner = match &self.projections {
            ProjectionsSpec::Heads(heads) => heads.floats(self.heads),
            ProjectionsSpec::Latent(latent) => latent.floats(self.heads),
        };
        let has_latent = self.query_rank().is_some();
        let indexer = self.indexer.as_ref().map_or(0, |indexer| indexer.floats(has_latent));
        rows * (inner + self.gates() + indexer)
    }

    fn choice_bytes(&self, rows: usize, tokens: usize) -> u64 {
        self.indexer.as_ref().map_or(0, |indexer| buffer_bytes(rows, indexer.sets(), tokens))
    }

    fn longest_input(&self, hidden_size: usize) -> usize {
        hidden_size.max(self.output_columns())
    }

    /// Writes own keys and values to their pages first and reads them from there.
    fn run(
        &self,
        weights: &Attention,
        pass: &MixerPass<'_>,
        memory: &mut Memory,
        x: &[f32],
        buffers: &mut Buffers,
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        let memory = memory.pages(pass.place().group);
        let attention = AttentionPass { pass, weights, spec: self };
        let Buffers { inner: buffers, gates } = buffers;
        let mixed = match (&weights.projections, &self.projections) {
            (Projections::Heads(weights), ProjectionsSpec::Heads(spec)) => {
                attention.heads(memory, weights, spec, x, buffers)?
            }
            (Projections::Latent(weights), ProjectionsSpec::Latent(spec)) => {
                attention.latent(memory, weights, spec, x, buffers)?
            }
            _ => unreachable!("weights are loaded as the spec says"),
        };
        if let Some(gate) = &weights.output_gate {
            let gates = gates.take(pass.rows.count * self.gates());
            adapted(&pass.exec, gate, pass.adapters, x, gates)?;
            self.apply_gates(pass, gates, mixed)?;
        }
        norm_in_place(&pass.exec, weights.output_norm.as_ref(), mixed, self.output_columns())?;
        adapted_output(&pass.exec, &weights.output, pass.adapters, mixed, out)
    }
}

impl AttentionSpec {
    /// Multiplies the output by the sigmoid of its gates.
    fn apply_gates(&self, pass: &MixerPass<'_>, gates: &mut [f32], mixed: &mut [f32]) -> Result<(), PoolError> {
        let columns = self.output_columns();
        if self.gates() == columns {
            return apply_gate(&pass.exec, mixed, columns, Rows::new(gates, columns, 0), Activation::Sigmoid);
        }
        activate(&pass.exec, gates, Activation::Sigmoid)?;
        for_rows(&pass.exec, pass.rows.count, mixed, columns / self.heads, |index, head| {
            head.iter_mut().for_each(|x| *x *= gates[index]);
        })
    }
}

/// Returns a view without its first columns.
fn skip(x: Rows<'_>, columns: usize) -> Rows<'_> {
    Rows::new(x.data, x.stride, x.first + columns)
}

/// Attention of one block over a batch.
struct AttentionPass<'a> {
    pass: &'a MixerPass<'a>,
    weights: &'a Attention,
    spec: &'a AttentionSpec,
}

impl AttentionPass<'_> {
    /// Applies a rotary embedding, if there is one, to `heads` heads of `head_dim` columns.
    fn rotate(&self, rope: Option<usize>, x: RowsMut<'_>, heads: usize, head_dim: usize) -> Result<(), PoolError> {
        let Some(index) = rope else { return Ok(()) };
        let RopeSpec { rotary_dim, interleaved, .. } = self.pass.ropes[index];
        let RopeRows { cos, sin } = &self.pass.rows.ropes[index];
        let rope = Rope { heads, head_dim, first: 0, rotary_dim, interleaved, cos, sin };
        rope_in_place(&self.pass.exec, x, &rope)
    }

    /// Multiplies the first `width` columns of each row of the queries by the factor of its position.
    fn grow(&self, queries: RowsMut<'_>, width: usize) -> Result<(), PoolError> {
        let Some(growth) = self.spec.query_growth else { return Ok(()) };
        let sequences = &self.pass.rows.sequences[self.pass.place().group];
        let positions = sequences.iter().flat_map(|sequence| (sequence.first_position..).take(sequence.rows));
        let factors: Vec<f32> = positions.map(|position| growth.factor(position)).collect();
        scale_rows(&self.pass.exec, queries, width, &factors)
    }

    /// Writes own keys and values to their pages and returns the output of attention: `[rows, heads * value_dim]`.
    fn attend<'b>(
        &self,
        (store, selection): (&mut KvStore, &Selection),
        queries: Rows<'_>,
        own: Option<[Rows<'_>; 2]>,
        mixed: &'b mut Scratch<f32>,
    ) -> Result<&'b mut [f32], PoolError> {
        let MixerPass { exec, causal, rows, .. } = self.pass;
        let (spec, Place { group, index }) = (self.spec, self.pass.place());
        // The heads may be divided among workers: this one has those of its keys and values.
        let KvShape { kv_heads, key_dim, value_dim, .. } = store.shape();
        let ranks = spec.kv_heads() / kv_heads;
        let workers = self.pass.group.filter(|_| ranks > 1);
        let heads_of = |rank: usize| rank * (spec.heads / ranks)..(rank + 1) * (spec.heads / ranks);
        let rank = workers.map_or(0, TensorParallelGroup::rank);
        let own_heads = heads_of(rank);
        if let Some([keys, values]) = own {
            let first = rank * kv_heads;
            let (keys, values) = (skip(keys, first * key_dim), skip(values, first * value_dim));
            store.write(exec, index, &rows.places[group], keys, values)?;
        }
        let mixed = mixed.take(rows.count * spec.heads * value_dim);
        let shape = AttentionShape {
            heads: own_heads.len(),
            kv_heads,
            key_dim,
            value_dim,
            scale: spec.scale,
            bidirectional: !causal,
            window: spec.window,
            chunk: spec.chunk,
            softcap: spec.softcap,
            slopes: spec.alibi_slopes.as_ref().map(|slopes| &slopes[own_heads.clone()]),
            sinks: self.weights.sinks.as_ref().map(|sinks| &sinks[own_heads.clone()]),
            selection: (spec.indexer.is_some() || spec.selection_layer.is_some()).then_some(selection),
        };
        let queries = skip(queries, own_heads.start * key_dim);
        let attend = |out: &mut [f32]| attention(exec, queries, store, index, &shape, &rows.sequences[group], out);
        match workers {
            None => attend(mixed)?,
            Some(workers) => {
                let columns = |rank: usize| heads_of(rank).start * value_dim..heads_of(rank).end * value_dim;
                gather_columns(exec, workers, (spec.heads * value_dim, columns), mixed, attend)?;
            }
        }
        Ok(mixed)
    }
}

#[cfg(test)]
mod tests {
    use super::QueryGrowth;

    #[test]
    fn queries_grow_by_the_logarithm_of_whole_lengths() {
        let growth = QueryGrowth { beta: 0.5, length: 4, offset: 0 };
        assert_eq!([0, 3].map(|position| growth.factor(position)), [1.0; 2]);
        assert_eq!([4, 7].map(|position| growth.factor(position)), [1.0 + 0.5 * std::f32::consts::LN_2; 2]);
        assert_eq!(QueryGrowth { offset: 1, ..growth }.factor(3), growth.factor(4));
    }
}
