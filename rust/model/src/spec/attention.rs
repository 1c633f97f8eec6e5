//! Attention.

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
    /// Query heads.
    pub heads: usize,
    /// Factor on the scores, mostly 1 / sqrt(key_dim).
    pub scale: f32,
    /// Where queries, keys and values come from.
    pub projections: ProjectionsSpec,
    /// Whether the output projection adds a bias.
    pub output_bias: bool,
    /// Index of the rotation in [`super::ModelSpec::ropes`]; none means unrotated.
    pub rope: Option<usize>,
    /// Positions that a row sees, its own among them; none means all. Without causality as many on either side.
    pub window: Option<usize>,
    /// Scores s become softcap * tanh(s / softcap).
    pub softcap: Option<f32>,
    /// For each head the factor on the distance between positions (ALiBi; Press et al. 2022).
    pub alibi_slopes: Option<Vec<f32>>,
    /// Whether each head has a learned logit that takes part in the softmax and mixes in nothing.
    pub sinks: bool,
}

/// Where queries, keys and values come from.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ProjectionsSpec {
    /// Projected from the input.
    Heads(HeadProjections),
    /// Keys and values out of one latent vector (MLA; DeepSeek-V2, 2024).
    Latent(LatentProjections),
}

/// Queries, keys and values are projected from the input, with any number of query heads to a key-value head.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct HeadProjections {
    /// Key-value heads: a divisor of the query heads.
    pub kv_heads: usize,
    /// Width of a query or key.
    pub key_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
    /// Whether the projections add a bias.
    pub bias: bool,
    /// A norm of queries and keys.
    pub qk_norm: Option<HeadNormSpec>,
    /// Largest magnitude of queries, keys and values, once normed.
    pub clip: Option<f32>,
}

/// Keys and values of all heads come out of one latent vector. The cache holds the latent and the rotated part of the
/// key: `key = [up(latent), rotated]`, so that a score is `up^T(query) . latent + query . rotated`, and what is mixed are
/// latents, which each head maps to its values afterwards.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LatentProjections {
    /// Width of the queries' latent; none where they are projected at once.
    pub query_rank: Option<usize>,
    /// Width of the keys' and values' latent.
    pub kv_rank: usize,
    /// Leading elements of a head's query and key, which are not rotated.
    pub nope_dim: usize,
    /// The others, which are; a key has one set of them for all heads.
    pub rope_dim: usize,
    /// Width of a head's value.
    pub value_dim: usize,
    /// Of both latents.
    pub norm: NormSpec,
    /// Whether the projections from the input add a bias.
    pub bias: bool,
    /// Whether the way out of the keys' and values' latent is stored as two stacks of matrices, one for each head:
    /// `[heads, kv_rank, nope_dim]` for the keys, the other way round, and `[heads, value_dim, kv_rank]`. Else it is one
    /// matrix, in which each head has `nope_dim` rows and then `value_dim`.
    pub split: bool,
}

impl AttentionSpec {
    /// What the cache keeps of a token in one layer.
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

    /// Columns that go into the output projection.
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
