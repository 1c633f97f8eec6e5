//! The complete description of an architecture, as data. Python's `archs/` write it, [`crate::Transformer`] runs it.
//!
//! Everything that tells one family of models from another is a field here. A field or a value that this build does
//! not know is refused by its name, so that an unsupported switch can never be passed over in silence.

use std::collections::BTreeMap;

use ferrule_kernels::activation::Activation;
use serde::{Deserialize, Serialize};

use crate::limits::{SpecError, require, size};
use crate::rope::RopeSpec;

/// A model, completely.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// Its family, for messages.
    pub architecture: String,
    /// Tokens of the vocabulary: rows of the embedding and logits of a row.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Positions that the model was made for.
    pub max_position_embeddings: usize,
    /// The rotations that layers name by index.
    pub ropes: Vec<RopeSpec>,
    /// The layers, first to last.
    pub layers: Vec<LayerSpec>,
    /// Before the head.
    pub final_norm: NormSpec,
    /// From hidden states to logits.
    pub head: HeadSpec,
    /// Which stored tensor plays which role.
    pub tensors: BTreeMap<String, TensorSpec>,
}

/// One transformer layer: x += attention(norm(x)); x += ffn(norm(x)).
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LayerSpec {
    /// Before attention.
    pub attention_norm: NormSpec,
    /// Attention over the sequence.
    pub attention: AttentionSpec,
    /// Before the feed-forward network.
    pub ffn_norm: NormSpec,
    /// The feed-forward network.
    pub ffn: FfnSpec,
}

/// A normalization over the last axis.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum NormSpec {
    /// x / rms(x) * (weight + weight_offset); Zhang and Sennrich 2019.
    Rms {
        /// Added to the mean of squares.
        eps: f32,
        /// Added to the stored weight.
        #[serde(default)]
        weight_offset: f32,
    },
    /// (x - mean) / std * weight + bias; Ba et al. 2016.
    Layer {
        /// Added to the variance.
        eps: f32,
    },
}

/// A normalization of each head.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum HeadNormSpec {
    /// As [`NormSpec::Rms`], with one weight for all heads.
    Rms {
        /// Added to the mean of squares.
        eps: f32,
        /// Added to the stored weight.
        #[serde(default)]
        weight_offset: f32,
    },
}

/// Softmax attention, with any number of query heads to a key-value head.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionSpec {
    /// Query heads.
    pub heads: usize,
    /// Key-value heads: a divisor of `heads`.
    pub kv_heads: usize,
    /// Width of a query or key.
    pub key_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
    /// Factor on the scores, mostly 1 / sqrt(key_dim).
    pub scale: f32,
    /// Positions that a row sees, its own among them; none means all.
    pub window: Option<usize>,
    /// Index of the rotation in [`ModelSpec::ropes`]; none means unrotated.
    pub rope: Option<usize>,
    /// Whether the projections to queries, keys and values add a bias.
    pub qkv_bias: bool,
    /// Whether the output projection adds a bias.
    pub output_bias: bool,
    /// A norm over each query and key head before the rotation.
    pub qk_norm: Option<HeadNormSpec>,
}

/// A feed-forward network.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum FfnSpec {
    /// down(activation(gate(x)) * up(x)); Shazeer 2020.
    Gated {
        /// Width between.
        intermediate_size: usize,
        /// On the gate.
        activation: ActivationSpec,
        /// Whether all three projections add a bias.
        bias: bool,
    },
}

/// The names of [`Activation`]s.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationSpec {
    /// x * sigmoid(x)
    Silu,
    /// GELU by its tanh approximation.
    GeluTanh,
    /// GELU by the error function.
    Gelu,
}

impl From<ActivationSpec> for Activation {
    fn from(spec: ActivationSpec) -> Self {
        match spec {
            ActivationSpec::Silu => Self::Silu,
            ActivationSpec::GeluTanh => Self::GeluTanh,
            ActivationSpec::Gelu => Self::Gelu,
        }
    }
}

/// The projection to the vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct HeadSpec {
    /// Whether it is the embedding's matrix.
    pub tied: bool,
    /// Whether it adds a bias.
    pub bias: bool,
}

/// Where a role's weights lie.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TensorSpec {
    /// Name of the tensor in the checkpoint.
    pub name: String,
}

/// More layers than any model has; a spec beyond it is a damaged file.
const MAX_LAYERS: usize = 4096;

impl ModelSpec {
    /// Reads and checks a spec.
    ///
    /// # Errors
    /// [`SpecError`] for an unknown switch or a number outside its limits.
    pub fn from_json(json: &str) -> Result<Self, SpecError> {
        let spec: Self = serde_json::from_str(json).map_err(|error| SpecError::Json(error.to_string()))?;
        spec.check()?;
        Ok(spec)
    }

    /// The tensor that plays `role`.
    ///
    /// # Errors
    /// [`SpecError::Role`] if none is named.
    pub fn tensor(&self, role: &str) -> Result<&str, SpecError> {
        let tensor = self.tensors.get(role).ok_or_else(|| SpecError::Role { role: role.to_owned() })?;
        Ok(&tensor.name)
    }

    fn check(&self) -> Result<(), SpecError> {
        size("vocab_size", self.vocab_size)?;
        size("hidden_size", self.hidden_size)?;
        size("max_position_embeddings", self.max_position_embeddings)?;
        require("layers (their number)", self.layers.len(), (1..=MAX_LAYERS).contains(&self.layers.len()), || {
            format!("in 1..={MAX_LAYERS}")
        })?;
        self.final_norm.check("final_norm")?;
        for (i, rope) in self.ropes.iter().enumerate() {
            rope.check(&format!("ropes[{i}]"))?;
        }
        for (i, layer) in self.layers.iter().enumerate() {
            layer.attention_norm.check(&format!("layers[{i}].attention_norm"))?;
            layer.ffn_norm.check(&format!("layers[{i}].ffn_norm"))?;
            layer.attention.check(&format!("layers[{i}].attention"), &self.ropes)?;
            let FfnSpec::Gated { intermediate_size, .. } = layer.ffn;
            size(&format!("layers[{i}].ffn.intermediate_size"), intermediate_size)?;
        }
        Ok(())
    }
}

impl NormSpec {
    fn check(&self, path: &str) -> Result<(), SpecError> {
        let (Self::Rms { eps, .. } | Self::Layer { eps }) = *self;
        epsilon(path, eps)
    }
}

fn epsilon(path: &str, eps: f32) -> Result<(), SpecError> {
    require(&format!("{path}.eps"), eps, eps.is_finite() && eps >= 0.0, || "finite and >= 0".to_owned())
}

impl AttentionSpec {
    fn check(&self, path: &str, ropes: &[RopeSpec]) -> Result<(), SpecError> {
        size(&format!("{path}.heads"), self.heads)?;
        size(&format!("{path}.kv_heads"), self.kv_heads)?;
        size(&format!("{path}.key_dim"), self.key_dim)?;
        size(&format!("{path}.value_dim"), self.value_dim)?;
        for (name, columns) in [("key_dim", self.heads * self.key_dim), ("value_dim", self.heads * self.value_dim)] {
            size(&format!("{path}.heads * {path}.{name}"), columns)?;
        }
        require(&format!("{path}.kv_heads"), self.kv_heads, self.heads.is_multiple_of(self.kv_heads), || {
            format!("a divisor of heads ({})", self.heads)
        })?;
        require(&format!("{path}.scale"), self.scale, self.scale.is_finite(), || "finite".to_owned())?;
        if let Some(window) = self.window {
            size(&format!("{path}.window"), window)?;
        }
        if let Some(rope) = self.rope {
            let known = ropes.get(rope);
            require(&format!("{path}.rope"), rope, known.is_some(), || format!("below {}", ropes.len()))?;
            let rotary_dim = known.map_or(0, |rope| rope.rotary_dim);
            require(&format!("ropes[{rope}].rotary_dim"), rotary_dim, rotary_dim <= self.key_dim, || {
                format!("at most {path}.key_dim ({})", self.key_dim)
            })?;
        }
        match self.qk_norm {
            Some(HeadNormSpec::Rms { eps, .. }) => epsilon(&format!("{path}.qk_norm"), eps),
            None => Ok(()),
        }
    }
}
