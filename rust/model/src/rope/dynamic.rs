//! Dynamic NTK-aware scaling: the base grows with the sequence once it exceeds the original context.

use serde::{Deserialize, Serialize};

use super::positive;
use crate::limits::{SpecError, require};

/// Dynamic NTK-aware scaling.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Dynamic {
    /// Growth of the base with the length.
    pub factor: f64,
    /// Length of the original context, up to which nothing changes.
    pub original_max_position_embeddings: usize,
}

impl Dynamic {
    pub(super) fn check(&self, path: &str) -> Result<(), SpecError> {
        let length = self.original_max_position_embeddings;
        require(&format!("{path}.factor"), self.factor, self.factor.is_finite() && self.factor >= 1.0, || {
            "finite and >= 1".to_owned()
        })?;
        positive(&format!("{path}.original_max_position_embeddings"), length as f64)
    }

    /// Returns the number of leading positions with the original base, for a prompt of `prompt_len` tokens.
    pub(super) fn shareable_tokens(&self, prompt_len: usize) -> usize {
        let trained = self.original_max_position_embeddings;
        if prompt_len <= trained { trained } else { 0 }
    }

    /// Returns the base for a sequence of `length` tokens.
    pub(super) fn theta(&self, theta: f64, rotary_dim: usize, length: usize) -> f64 {
        let original = self.original_max_position_embeddings;
        let growth = self.factor * length.max(original) as f64 / original as f64 - (self.factor - 1.0);
        let dim = rotary_dim as f64;
        // A single pair has frequency 1 whatever the base; the exponent is infinite there.
        if rotary_dim == 2 { theta } else { theta * growth.powf(dim / (dim - 2.0)) }
    }
}
