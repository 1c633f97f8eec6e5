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

use ferrule_kernels::PackedMatrix;
use ferrule_kernels::norm::NormWeights;

pub use error::LoadError;
pub use files::{StoredTypes, WeightFiles};
pub(crate) use load::Loader;
pub(crate) use pack::{PackedOutput, QUANTIZATION, check_quantization, refuse_packed};
pub use pack::{open_packed, pack_into};
pub use plan::Progress;
pub(crate) use plan::{MatrixPlan, Measure, Pack, Packer};
pub(crate) use sites::{HeadSplit, Site};
pub(crate) use sizes::MatrixSize;
pub use sizes::WeightSizes;
pub use source::Source;
pub(crate) use stored::{Stored, View};

use crate::spec::NormSpec;

/// Linear layer: `y = W x + b`.
pub(crate) struct Linear<M = PackedMatrix> {
    pub weight: M,
    pub bias: Option<Vec<f32>>,
    /// Index in [`Weights::sites`].
    pub site: usize,
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

/// Embedding of tokens, positions and token types.
pub(crate) struct Embedding<M = PackedMatrix> {
    /// One row per token; also the matrix of a tied lm_head.
    pub tokens: M,
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
    pub attention: Attention<M>,
    pub ffn: Ffn<M>,
    pub attention_norm: Option<Norm>,
    pub attention_post_norm: Option<Norm>,
    pub attention_sum_norm: Option<Norm>,
    pub ffn_norm: Option<Norm>,
    pub ffn_post_norm: Option<Norm>,
    pub ffn_sum_norm: Option<Norm>,
}

/// Weights of attention. Projections that share an input are stacked in one matrix.
pub(crate) struct Attention<M = PackedMatrix> {
    pub projections: Projections<M>,
    pub output: Linear<M>,
    /// Attention sinks: one logit per head.
    pub sinks: Option<Vec<f32>>,
}

pub(crate) enum Projections<M = PackedMatrix> {
    Heads(Heads<M>),
    Latent(Latent<M>),
}

/// Weights of multi-head attention.
pub(crate) struct Heads<M = PackedMatrix> {
    /// Rows: all query heads, all key heads, all value heads.
    pub qkv: Linear<M>,
    /// Norms of queries and of keys.
    pub norms: Option<[Norm; 2]>,
}

/// Weights of multi-head latent attention.
pub(crate) struct Latent<M = PackedMatrix> {
    /// Rows: the queries' latent, or all query heads; the latent of keys and values; the rotated part of the key.
    pub input: Linear<M>,
    /// Norm of the queries' latent, and the projection from there to all query heads.
    pub queries: Option<(Norm, Linear<M>)>,
    /// Norm of the latent of keys and values.
    pub norm: Norm,
    /// Projection of each head from the unrotated part of its query to the latent: `[kv_rank, nope_dim]`.
    pub key_up: Vec<M>,
    /// Projection of each head from mixed latents to its output: `[value_dim, kv_rank]`.
    pub value_up: Vec<M>,
    /// Index in [`Weights::sites`] of the matrix that `key_up` and `value_up` are slices of.
    pub up_site: usize,
}

pub(crate) enum Ffn<M = PackedMatrix> {
    Dense(Dense<M>),
    Experts(Experts<M>),
}

pub(crate) struct Dense<M = PackedMatrix> {
    /// Rows: gate and up, or only up.
    pub inner: Linear<M>,
    pub down: Linear<M>,
}

pub(crate) struct Experts<M = PackedMatrix> {
    /// One row per expert, in f32.
    pub router: Linear<M>,
    /// Correction bias, added to the scores when experts are chosen.
    pub correction: Option<Vec<f32>>,
    pub experts: Vec<Dense<M>>,
    pub shared: Option<Dense<M>>,
    /// Gate of the shared expert: one row, in f32.
    pub shared_gate: Option<Linear<M>>,
}

/// All weights of a model.
pub(crate) struct Weights<M = PackedMatrix> {
    pub embedding: Embedding<M>,
    pub layers: Vec<Layer<M>>,
    pub final_norm: Option<Norm>,
    /// Projection from `hidden_size` to the width of the lm_head's rows.
    pub lm_head_projection: Option<Linear<M>>,
    /// The lm_head, unless it is tied to the embedding or the model has none.
    pub lm_head: Option<Linear<M>>,
    /// Bias of a tied lm_head.
    pub tied_lm_head_bias: Option<Vec<f32>>,
    /// Linear layers that adapters can change.
    pub sites: Vec<Site>,
    pub classifier: Option<Classifier<M>>,
    /// Projections from the pooled hidden state of a text to its embedding.
    pub text_projections: Vec<Linear<M>>,
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
    fn linear(&mut self, linear: &'a Linear<M>) {
        self.matrices.push(&linear.weight);
        self.vectors.extend(&linear.bias);
    }

    fn norm(&mut self, norm: &'a Norm) {
        self.vectors.extend(norm.weight.iter().chain(&norm.bias));
    }

    fn dense(&mut self, dense: &'a Dense<M>) {
        self.linear(&dense.inner);
        self.linear(&dense.down);
    }

    fn attention(&mut self, attention: &'a Attention<M>) {
        match &attention.projections {
            Projections::Heads(Heads { qkv, norms }) => {
                self.linear(qkv);
                norms.iter().flatten().for_each(|norm| self.norm(norm));
            }
            Projections::Latent(Latent { input, queries, norm, key_up, value_up, .. }) => {
                self.linear(input);
                if let Some((norm, linear)) = queries {
                    self.norm(norm);
                    self.linear(linear);
                }
                self.norm(norm);
                self.matrices.extend(key_up.iter().chain(value_up));
            }
        }
        self.linear(&attention.output);
        self.vectors.extend(&attention.sinks);
    }

    fn ffn(&mut self, ffn: &'a Ffn<M>) {
        match ffn {
            Ffn::Dense(dense) => self.dense(dense),
            Ffn::Experts(Experts { router, correction, experts, shared, shared_gate }) => {
                self.linear(router);
                self.vectors.extend(correction);
                experts.iter().chain(shared).for_each(|dense| self.dense(dense));
                shared_gate.iter().for_each(|linear| self.linear(linear));
            }
        }
    }
}

impl<M> Layer<M> {
    /// Returns the norms, in the order in which they are applied.
    fn norms(&self) -> impl Iterator<Item = &Norm> {
        let Self {
            attention_norm, attention_post_norm, attention_sum_norm, ffn_norm, ffn_post_norm, ffn_sum_norm, ..
        } = self;
        [attention_norm, attention_post_norm, attention_sum_norm, ffn_norm, ffn_post_norm, ffn_sum_norm]
            .into_iter()
            .flatten()
    }

    pub fn tensors(&self) -> Tensors<'_, M> {
        let mut tensors = Tensors::default();
        tensors.attention(&self.attention);
        tensors.ffn(&self.ffn);
        self.norms().for_each(|norm| tensors.norm(norm));
        tensors
    }
}

impl<M> Weights<M> {
    /// Returns all matrices and vectors.
    pub fn tensors(&self) -> Tensors<'_, M> {
        let mut tensors = Tensors::default();
        let Embedding { tokens, projection, positions, token_types, norm } = &self.embedding;
        tensors.matrices.push(tokens);
        projection.iter().for_each(|linear| tensors.linear(linear));
        tensors.vectors.extend(positions.iter().chain(token_types));
        norm.iter().for_each(|norm| tensors.norm(norm));
        for layer in &self.layers {
            let Tensors { matrices, vectors } = layer.tensors();
            tensors.matrices.extend(matrices);
            tensors.vectors.extend(vectors);
        }
        self.final_norm.iter().for_each(|norm| tensors.norm(norm));
        self.lm_head_projection.iter().chain(&self.lm_head).for_each(|linear| tensors.linear(linear));
        tensors.vectors.extend(&self.tied_lm_head_bias);
        if let Some(Classifier { dense, norm, labels }) = &self.classifier {
            dense.iter().for_each(|linear| tensors.linear(linear));
            norm.iter().for_each(|norm| tensors.norm(norm));
            tensors.linear(labels);
        }
        self.text_projections.iter().for_each(|linear| tensors.linear(linear));
        tensors
    }
}
