//! Proportional rotary embedding (Gemma 4).

use serde::{Deserialize, Serialize};

use super::positive;
use crate::limits::{SpecError, require};

/// Proportional: the first pairs rotate with the frequencies of the whole head, the others do not rotate. A partial
/// rotary embedding instead takes its pairs and frequencies from the rotated part of a head only.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Proportional {
    /// Number of pairs that rotate.
    pub rotated_pairs: usize,
    /// Divisor of every frequency.
    pub factor: f64,
}

impl Proportional {
    pub(super) fn check(&self, path: &str, rotary_dim: usize) -> Result<(), SpecError> {
        positive(&format!("{path}.factor"), self.factor)?;
        let pairs = rotary_dim / 2;
        require(&format!("{path}.rotated_pairs"), self.rotated_pairs, self.rotated_pairs <= pairs, || {
            format!("at most {pairs}, the pairs of a head")
        })
    }

    /// Returns the frequency of pair `index`, which is `frequency` without scaling.
    pub(super) fn scale(&self, frequency: f64, index: usize) -> f64 {
        if index < self.rotated_pairs { frequency / self.factor } else { 0.0 }
    }
}
