//! LongRoPE (Ding et al. 2024): each frequency has its own divisor, from one of two sets. The long set applies once the
//! sequence exceeds the original context.

use serde::{Deserialize, Serialize};

use super::positive;
use crate::limits::{SpecError, require};

/// LongRoPE: two sets of divisors, chosen by the sequence length.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LongRope {
    /// Divisors up to the original context, one per pair.
    pub short_factor: Vec<f64>,
    /// Divisors beyond the original context, one per pair.
    pub long_factor: Vec<f64>,
    /// Length of the original context in tokens.
    pub original_max_position_embeddings: usize,
    /// Factor on cosine and sine.
    pub attention_factor: f64,
    /// Factor on cosine and sine beyond the original context; `None` for `attention_factor`.
    #[serde(default)]
    pub long_attention_factor: Option<f64>,
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
        positive(&format!("{path}.attention_factor"), self.attention_factor)?;
        positive(&format!("{path}.long_attention_factor"), self.factor_at(usize::MAX))
    }

    /// Returns the divisors for a sequence of `length` tokens.
    pub(super) fn factors(&self, length: usize) -> &[f64] {
        if self.is_long(length) { &self.long_factor } else { &self.short_factor }
    }

    /// Returns the factor on cosine and sine for a sequence of `length` tokens.
    pub(super) fn factor_at(&self, length: usize) -> f64 {
        self.long_attention_factor.filter(|_| self.is_long(length)).unwrap_or(self.attention_factor)
    }

    /// Returns whether a sequence of `length` tokens exceeds the original context.
    fn is_long(&self, length: usize) -> bool {
        length > self.original_max_position_embeddings
    }

    /// Returns the number of leading positions that use the short set, for a prompt of `prompt_len` tokens.
    pub(super) fn shareable_tokens(&self, prompt_len: usize) -> usize {
        let original = self.original_max_position_embeddings;
        if prompt_len <= original { original } else { 0 }
    }
}
