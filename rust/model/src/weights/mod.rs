//! The weights of a model, as the kernels read them.
//!
//! The type parameter `M` is the matrix type: [`PackedMatrix`] in a loaded model, or a size while memory is computed.

mod buffers;
mod error;
mod files;
mod load;
mod pack;
mod plan;
mod sites;
mod sizes;
mod source;
mod stored;
mod table;

use std::collections::BTreeMap;
use std::sync::Arc;

use ferrule_kernels::memory::touch_pages;
use ferrule_kernels::norm::NormWeights;
use ferrule_kernels::{Exec, PackedMatrix, PoolError};

pub use error::LoadError;
pub use files::{StoredTypes, WeightFiles};
pub(crate) use load::{Loader, RolePart};
pub(crate) use pack::{PackedOutput, QUANTIZATION, QuantizedRoles, check_quantization, check_recipe, refuse_packed};
pub use pack::{open_packed, pack_into};
pub use plan::Progress;
pub(crate) use plan::{MatrixPlan, Measure, Pack, Packer};
pub(crate) use sites::{HeadSplit, Site};
pub(crate) use sizes::MatrixSize;
pub use sizes::WeightSizes;
pub use source::Source;
pub(crate) use source::{MatrixPart, Slice};
pub(crate) use stored::{Stored, View};
pub(crate) use table::{TokenTable, release_tokens};

use crate::adapter::LowRank;
use crate::mixers::MixerWeights;
use crate::spec::NormSpec;
use crate::stage::TensorParallelGroup;
use crate::streams::{StreamEnds, StreamMix};

/// Linear layer: `y = W x + b`.
pub(crate) struct Linear<M = PackedMatrix> {
    pub weight: M,
    pub bias: Option<Vec<f32>>,
    /// Index in [`Weights::sites`].
    pub site: usize,
    /// Number of outputs.
    pub outputs: usize,
    /// The workers that divide the rows of the matrix; `None` if `weight` has all rows.
    pub group: Option<Arc<TensorParallelGroup>>,
}

/// The spec and the weights of a norm.
pub(crate) struct Norm {
    pub spec: NormSpec,
    pub weight: Option<Vec<f32>>,
    pub bias: Option<Vec<f32>>,
}

impl Norm {
    /// Returns the arguments of the norm kernels.
    pub fn weights(&self) -> NormWeights<'_> {
        let (NormSpec::Rms { eps, weight_offset, .. } | NormSpec::Layer { eps, weight_offset, .. }) = self.spec;
        NormWeights { weight: self.weight.as_deref(), bias: self.bias.as_deref(), weight_offset, eps }
    }
}

/// Embedding of tokens, positions and token types. Of several pipeline stages, the first one has it, and each has its rows
/// of the matrix `tokens`.
pub(crate) struct Embedding<M = PackedMatrix> {
    /// One row per token; also the matrix of a tied lm_head. `None` in a first stage that has no rows of it.
    pub tokens: Option<Linear<M>>,
    /// Projection from a narrower embedding to `hidden_size`.
    pub projection: Option<Linear<M>>,
    /// Position embeddings: `[positions, hidden_size]`.
    pub positions: Option<Vec<f32>>,
    /// Token type embeddings: `[token types, hidden_size]`.
    pub token_types: Option<Vec<f32>>,
    pub norm: Option<Norm>,
}

/// Weights of one layer.
pub(crate) struct Layer<M = PackedMatrix> {
    pub blocks: Vec<BlockUse<M>>,
    /// Weights by which each span reads and writes the residual streams.
    pub mixes: Vec<StreamMix<M>>,
    /// Factor on the residual stream after the last block: one number.
    pub scalar: Option<Vec<f32>>,
}

/// Use of the weights of a residual block in a layer.
pub(crate) struct BlockUse<M = PackedMatrix> {
    pub block: Arc<Block<M>>,
    /// Whether the weights are those of an earlier layer's block.
    pub is_shared: bool,
    /// Additions to the linear layers of the block in this use, by site.
    pub low_rank: BTreeMap<usize, Vec<LowRank<M>>>,
}

/// Weights of a residual block.
pub(crate) struct Block<M = PackedMatrix> {
    pub mixer: MixerWeights<M>,
    pub norm: Option<Norm>,
    pub post_norm: Option<Norm>,
    pub sum_norm: Option<Norm>,
    pub joint_norm: Option<Norm>,
}

/// All weights of a model, or of a pipeline stage of it.
pub(crate) struct Weights<M = PackedMatrix> {
    /// Embedding, in the first stage and in those that have rows of its matrix.
    pub embedding: Option<Embedding<M>>,
    /// Tables that stay in their file.
    pub tables: Vec<TokenTable>,
    /// Beginning and end of several residual streams, in the first and the last stage.
    pub streams: Option<StreamEnds<M>>,
    pub layers: Vec<Layer<M>>,
    pub final_norm: Option<Norm>,
    /// Projection from `hidden_size` to the width of the lm_head's rows.
    pub lm_head_projection: Option<Linear<M>>,
    /// The lm_head, unless it is tied to the embedding or the model has none.
    pub lm_head: Option<Linear<M>>,
    /// Bias of an lm_head that is tied or divided among stages, with the numbers of all tokens.
    pub lm_head_bias: Option<Vec<f32>>,
    /// Linear layers that adapters can change.
    pub sites: Vec<Site>,
    pub classifier: Option<Classifier<M>>,
    /// Projections from the pooled hidden state of a text to its embedding.
    pub text_projections: Vec<Linear<M>>,
}

impl Weights {
    /// Has the pages of mapped weights read by threads of the NUMA node that computes with them. Pages of the file that
    /// are in memory already stay where they are.
    pub fn place(&self, exec: &Exec<'_>) -> Result<(), PoolError> {
        if exec.pool.nodes() == 1 {
            return Ok(());
        }
        let tensors = self.tensors();
        let mapped = tensors.matrices.iter().filter(|matrix| matrix.shared_bytes() > 0);
        mapped.flat_map(|matrix| matrix.buffers()).try_for_each(|bytes| touch_pages(exec, bytes))
    }
}

/// Classifier: from the pooled hidden state of a text to its scores.
pub(crate) struct Classifier<M = PackedMatrix> {
    /// Projection before the activation.
    pub dense: Option<Linear<M>>,
    pub norm: Option<Norm>,
    /// One row per label, in f32.
    pub labels: Linear<M>,
}

/// All matrices and vectors, in a fixed order.
pub(crate) struct Tensors<'a, M = PackedMatrix> {
    pub matrices: Vec<&'a M>,
    /// Norms, biases and tables.
    pub vectors: Vec<&'a Vec<f32>>,
}

impl<M> Default for Tensors<'_, M> {
    fn default() -> Self {
        Self { matrices: Vec::new(), vectors: Vec::new() }
    }
}

impl<'a, M> Tensors<'a, M> {
    pub fn linear(&mut self, linear: &'a Linear<M>) {
        self.matrices.push(&linear.weight);
        self.vectors.extend(&linear.bias);
    }

    pub fn norm(&mut self, norm: &'a Norm) {
        self.vectors.extend(norm.weight.iter().chain(&norm.bias));
    }
}

impl<M> Block<M> {
    fn list<'a>(&'a self, tensors: &mut Tensors<'a, M>) {
        let Self { mixer, norm, post_norm, sum_norm, joint_norm } = self;
        mixer.list(tensors);
        [norm, post_norm, sum_norm, joint_norm].into_iter().flatten().for_each(|norm| tensors.norm(norm));
    }
}

impl<M> Layer<M> {
    /// Returns the tensors of the layer, without those of earlier layers that it uses.
    pub fn tensors(&self) -> Tensors<'_, M> {
        let mut tensors = Tensors::default();
        for BlockUse { block, is_shared, low_rank } in &self.blocks {
            if !is_shared {
                block.list(&mut tensors);
            }
            tensors.matrices.extend(low_rank.values().flatten().flat_map(|LowRank { a, b, .. }| [a, b]));
        }
        self.mixes.iter().for_each(|mix| mix.list(&mut tensors));
        tensors.vectors.extend(&self.scalar);
        tensors
    }

    /// Returns the tensors of earlier layers that the layer uses.
    pub fn shared_tensors(&self) -> Tensors<'_, M> {
        let mut tensors = Tensors::default();
        self.blocks.iter().filter(|used| used.is_shared).for_each(|used| used.block.list(&mut tensors));
        tensors
    }
}

impl<M> Embedding<M> {
    pub fn list<'a>(&'a self, tensors: &mut Tensors<'a, M>) {
        let Self { tokens, projection, positions, token_types, norm } = self;
        tokens.iter().chain(projection).for_each(|linear| tensors.linear(linear));
        tensors.vectors.extend(positions.iter().chain(token_types));
        norm.iter().for_each(|norm| tensors.norm(norm));
    }
}

impl<M> Weights<M> {
    /// Returns the embedding.
    ///
    /// # Panics
    /// In a stage that is not the first one and has no rows of the embedding's matrix.
    pub fn embedding(&self) -> &Embedding<M> {
        self.embedding.as_ref().expect("a stage that needs the embedding has it")
    }

    /// Returns all matrices and vectors.
    pub fn tensors(&self) -> Tensors<'_, M> {
        let mut tensors = Tensors::default();
        self.embedding.iter().for_each(|embedding| embedding.list(&mut tensors));
        self.streams.iter().for_each(|streams| streams.list(&mut tensors));
        for layer in &self.layers {
            let Tensors { matrices, vectors } = layer.tensors();
            tensors.matrices.extend(matrices);
            tensors.vectors.extend(vectors);
        }
        self.final_norm.iter().for_each(|norm| tensors.norm(norm));
        self.lm_head_projection.iter().chain(&self.lm_head).for_each(|linear| tensors.linear(linear));
        tensors.vectors.extend(&self.lm_head_bias);
        if let Some(Classifier { dense, norm, labels }) = &self.classifier {
            dense.iter().for_each(|linear| tensors.linear(linear));
            norm.iter().for_each(|norm| tensors.norm(norm));
            tensors.linear(labels);
        }
        self.text_projections.iter().for_each(|linear| tensors.linear(linear));
        tensors
    }
}
