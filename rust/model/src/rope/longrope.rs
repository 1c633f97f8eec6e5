//! LongRoPE (Ding et al. 2024): each frequency is divided by a factor of its own, of two sets. The long set takes over
//! once the sequence is longer than the original context.

use serde::{Deserialize, Serialize};

use super::positive;
use crate::limits::{SpecError, require};

/// Two sets of factors, by the sequence's length.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LongRope {
    /// Up to the original context, one for each pair.
    pub short_factor: Vec<f64>,
    /// Beyond it.
    pub long_factor: Vec<f64>,
    /// Tokens of the original context.
    pub original_max_position_embeddings: usize,
    /// Factor on cosine and sine.
    pub attention_factor: f64,
}

impl LongRope {
    pub(super) fn check(&self, path: &str, rotary_dim: usize) -> Result<(), SpecError> {
        for (name, factors) in [("short_factor", &self.short_factor), ("long_factor", &self.long_factor)] {
            let pairs = rotary_dim / 2;
            require(&format!("{path}.{name} (their number)"), factors.len(), factors.len() == pairs, || {
                format!("{pairs}, the number of pairs")
            })?;
            factors.iter().try_for_each(|factor| positive(&format!("{path}.{name}"), *factor))?;
        }
        positive(&format!("{path}.original_max_position_embeddings"), self.original_max_position_embeddings as f64)?;
        positive(&format!("{path}.attention_factor"), self.attention_factor)
    }

    /// The factors for a sequence of `length` tokens.
    pub(super) fn factors(&self, length: usize) -> &[f64] {
        if length > self.original_max_position_embeddings { &self.long_factor } else { &self.short_factor }
    }

    /// Leading positions that are rotated by the short factors, in a sequence whose prompt has so many tokens.
    pub(super) fn shareable_tokens(&self, prompt_len: usize) -> usize {
        let original = self.original_max_position_embeddings;
        if prompt_len <= original { original } else { 0 }
    }
}
