//! YaRN (Peng et al. 2023): pairs that rotate often within the original context are kept, those that rotate less than
//! once are divided, with a linear ramp over the pairs in between.

use std::f64::consts::TAU;

use serde::{Deserialize, Serialize};

use super::positive;
use crate::limits::{SpecError, require};

/// YaRN scaling.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Yarn {
    /// Divisor of the low frequencies.
    pub factor: f64,
    /// Length of the original context in tokens.
    pub original_max_position_embeddings: usize,
    /// Pairs that rotate more often than this in the original context are kept.
    pub beta_fast: f64,
    /// Pairs that rotate less often than this are divided.
    pub beta_slow: f64,
    /// Factor on cosine and sine.
    pub attention_factor: f64,
    /// Whether the ends of the ramp are rounded to whole pairs.
    pub truncate: bool,
}

impl Yarn {
    pub(super) fn check(&self, path: &str) -> Result<(), SpecError> {
        positive(&format!("{path}.factor"), self.factor)?;
        let length = self.original_max_position_embeddings;
        positive(&format!("{path}.original_max_position_embeddings"), length as f64)?;
        positive(&format!("{path}.beta_slow"), self.beta_slow)?;
        let (slow, fast) = (self.beta_slow, self.beta_fast);
        require(&format!("{path}.beta_fast"), fast, fast.is_finite() && fast >= slow, || {
            format!("finite and at least beta_slow ({slow})")
        })?;
        positive(&format!("{path}.attention_factor"), self.attention_factor)
    }

    /// Returns the first and the last pair of the ramp.
    pub(super) fn ramp(&self, theta: f64, rotary_dim: usize) -> (f64, f64) {
        let dim = rotary_dim as f64;
        let original = self.original_max_position_embeddings as f64;
        // Returns the pair that rotates `rotations` times in the original context.
        let pair = |rotations: f64| dim * (original / (rotations * TAU)).ln() / (2.0 * theta.ln());
        let (mut first, mut last) = (pair(self.beta_fast), pair(self.beta_slow));
        if self.truncate {
            (first, last) = (first.floor(), last.ceil());
        }
        (first.max(0.0), last.min(dim - 1.0))
    }

    pub(super) fn scale(&self, frequency: f64, (first, last): (f64, f64), pair: usize) -> f64 {
        // The reference implementation widens an empty ramp by this much.
        let last = if first == last { last + 0.001 } else { last };
        let divided = ((pair as f64 - first) / (last - first)).clamp(0.0, 1.0);
        frequency / self.factor * divided + frequency * (1.0 - divided)
    }
}
