//! Softmax attention: multi-head with grouped keys and values (MHA, GQA, MQA), or multi-head latent (MLA).

use ferrule_kernels::kv::KvShape;
use serde::{Deserialize, Serialize};

use super::norm::{self, HeadNormSpec, NormSpec};
use super::positive;
use crate::limits::{SpecError, finite, require, size};
use crate::rope::RopeSpec;

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
    /// Index of the rotary embedding in [`super::ModelSpec::ropes`]; `None` for no rotation.
    pub rope: Option<usize>,
    /// Sliding window: number of positions that a row attends to, including its own; `None` for all. In bidirectional
    /// attention, that many on either side.
    pub window: Option<usize>,
    /// Soft cap on scores: `s` becomes `softcap * tanh(s / softcap)`.
    pub softcap: Option<f32>,
    /// ALiBi: for each head, the factor on the distance between positions (Press et al. 2022).
    pub alibi_slopes: Option<Vec<f32>>,
    /// Attention sinks: whether each head has a learned logit that takes part in the softmax and adds no value.
    pub sinks: bool,
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

/// Multi-head or grouped-query attention: queries, keys and values are projected from the input.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct HeadProjections {
    /// Number of key-value heads, a divisor of the number of query heads.
    pub kv_heads: usize,
    /// Length of a query or key head.
    pub key_dim: usize,
    /// Length of a value head.
    pub value_dim: usize,
    /// Whether the projections add a bias.
    pub bias: bool,
    /// Norms of queries and keys.
    pub qk_norm: Option<HeadNormSpec>,
    /// Largest magnitude of queries, keys and values after their norms.
    pub clip: Option<f32>,
}

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

impl AttentionSpec {
    /// Returns the shape of what the KV cache stores per token in one layer.
    pub(crate) fn kv_shape(&self) -> KvShape {
        match &self.projections {
            ProjectionsSpec::Heads(HeadProjections { kv_heads, key_dim, value_dim, .. }) => {
                KvShape { layers: 1, kv_heads: *kv_heads, key_dim: *key_dim, value_dim: *value_dim }
            }
            ProjectionsSpec::Latent(LatentProjections { kv_rank, rope_dim, .. }) => {
                KvShape { layers: 1, kv_heads: 1, key_dim: kv_rank + rope_dim, value_dim: *kv_rank }
            }
        }
    }

    /// Returns the number of inputs of the output projection.
    pub(crate) fn output_columns(&self) -> usize {
        match &self.projections {
            ProjectionsSpec::Heads(HeadProjections { value_dim, .. })
            | ProjectionsSpec::Latent(LatentProjections { value_dim, .. }) => self.heads * value_dim,
        }
    }

    pub(super) fn check(&self, path: &str, ropes: &[RopeSpec]) -> Result<(), SpecError> {
        size(&format!("{path}.heads"), self.heads)?;
        finite(&format!("{path}.scale"), self.scale)?;
        positive(&format!("{path}.softcap"), self.softcap)?;
        if let Some(window) = self.window {
            size(&format!("{path}.window"), window)?;
        }
        if let Some(slopes) = &self.alibi_slopes {
            let fits = slopes.len() == self.heads && slopes.iter().all(|slope| slope.is_finite());
            require(&format!("{path}.alibi_slopes (their number)"), slopes.len(), fits, || {
                format!("that of the heads ({}), each one finite", self.heads)
            })?;
        }
        let (rotated, within) = match &self.projections {
            ProjectionsSpec::Heads(heads) => {
                heads.check(path, self.heads)?;
                (heads.key_dim, "key_dim")
            }
            ProjectionsSpec::Latent(latent) => {
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
}

impl HeadProjections {
    fn check(&self, path: &str, heads: usize) -> Result<(), SpecError> {
        let Self { kv_heads, key_dim, value_dim, .. } = *self;
        let path = format!("{path}.projections");
        size(&format!("{path}.kv_heads"), kv_heads)?;
        for (name, dim) in [("key_dim", key_dim), ("value_dim", value_dim)] {
            size(&format!("{path}.{name}"), dim)?;
            size(&format!("heads * {path}.{name}"), heads * dim)?;
        }
        require(&format!("{path}.kv_heads"), kv_heads, heads.is_multiple_of(kv_heads), || {
            format!("a divisor of heads ({heads})")
        })?;
        positive(&format!("{path}.clip"), self.clip)?;
        norm::check(&format!("{path}.qk_norm"), self.qk_norm.map(|qk_norm| qk_norm.norm))
    }
}

impl LatentProjections {
    fn check(&self, path: &str, heads: usize) -> Result<(), SpecError> {
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
        norm::check(&format!("{path}.norm"), Some(norm))
    }
}
