//! A model's weights as the kernels read them.
//!
//! `M` is a matrix: packed, or, while a model's size is computed, nothing.

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

/// y = W x + b
pub(crate) struct Linear<M = PackedMatrix> {
    pub weight: M,
    pub bias: Option<Vec<f32>>,
    /// Its number in [`Weights::sites`].
    pub site: usize,
}

/// A norm's spec with its weights.
pub(crate) struct Norm {
    pub spec: NormSpec,
    pub weight: Option<Vec<f32>>,
    pub bias: Option<Vec<f32>>,
}

impl Norm {
    /// As the kernels take them.
    pub fn weights(&self) -> NormWeights<'_> {
        let (NormSpec::Rms { eps, weight_offset, .. } | NormSpec::Layer { eps, weight_offset, .. }) = self.spec;
        NormWeights { weight: self.weight.as_deref(), bias: self.bias.as_deref(), weight_offset, eps }
    }
}

/// Where hidden states begin.
pub(crate) struct Embedding<M = PackedMatrix> {
    /// A row for each token; also the head's matrix where that is tied.
    pub tokens: M,
    /// To `hidden_size`.
    pub projection: Option<Linear<M>>,
    /// `[positions, hidden_size]`
    pub positions: Option<Vec<f32>>,
    /// `[kinds of tokens, hidden_size]`
    pub token_types: Option<Vec<f32>>,
    pub norm: Option<Norm>,
}

/// One layer's weights.
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

/// Attention: projections that share an input are one matrix.
pub(crate) struct Attention<M = PackedMatrix> {
    pub projections: Projections<M>,
    pub output: Linear<M>,
    /// A logit for each head.
    pub sinks: Option<Vec<f32>>,
}

pub(crate) enum Projections<M = PackedMatrix> {
    Heads(Heads<M>),
    Latent(Latent<M>),
}

/// Heads with projections of their own.
pub(crate) struct Heads<M = PackedMatrix> {
    /// Rows: all query heads, all key heads, all value heads.
    pub qkv: Linear<M>,
    /// Of queries and of keys.
    pub norms: Option<[Norm; 2]>,
}

/// Latent attention.
pub(crate) struct Latent<M = PackedMatrix> {
    /// Rows: the queries' latent, or all query heads; the latent of keys and values; the rotated part of the key.
    pub input: Linear<M>,
    /// Of the queries' latent, and from there to all query heads.
    pub queries: Option<(Norm, Linear<M>)>,
    /// Of the latent of keys and values.
    pub norm: Norm,
    /// For each head from the first part of its query to what meets the latent: `[kv_rank, nope_dim]`.
    pub key_up: Vec<M>,
    /// For each head from mixed latents to its output: `[value_dim, kv_rank]`.
    pub value_up: Vec<M>,
    /// The number in [`Weights::sites`] of the matrix that both are taken from.
    pub up_site: usize,
}

pub(crate) enum Ffn<M = PackedMatrix> {
    Dense(Dense<M>),
    Experts(Experts<M>),
}

pub(crate) struct Dense<M = PackedMatrix> {
    /// Rows: gate, up; or up alone.
    pub inner: Linear<M>,
    pub down: Linear<M>,
}

pub(crate) struct Experts<M = PackedMatrix> {
    /// A row for each expert, in f32.
    pub router: Linear<M>,
    /// Added to the scores where experts are chosen.
    pub correction: Option<Vec<f32>>,
    pub experts: Vec<Dense<M>>,
    pub shared: Option<Dense<M>>,
    /// One row, in f32.
    pub shared_gate: Option<Linear<M>>,
}

/// All weights.
pub(crate) struct Weights<M = PackedMatrix> {
    pub embedding: Embedding<M>,
    pub layers: Vec<Layer<M>>,
    pub final_norm: Option<Norm>,
    /// From `hidden_size` to the width of the head's rows.
    pub lm_head_projection: Option<Linear<M>>,
    /// None where the head is the embedding, or there is none.
    pub lm_head: Option<Linear<M>>,
    /// Of a head that is the embedding.
    pub tied_lm_head_bias: Option<Vec<f32>>,
    /// Where adapters may find their place.
    pub sites: Vec<Site>,
    pub classifier: Option<Classifier<M>>,
    /// From a text's pooled hidden state to its embedding.
    pub text_projections: Vec<Linear<M>>,
}

/// From a text's pooled hidden state to its scores.
pub(crate) struct Classifier<M = PackedMatrix> {
    /// Before the activation.
    pub dense: Option<Linear<M>>,
    pub norm: Option<Norm>,
    /// A row for each label, in f32.
    pub labels: Linear<M>,
}

/// Everything that weights consist of, in one order.
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
    /// The norms, in the order of their names' places.
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
    /// Everything there is.
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
