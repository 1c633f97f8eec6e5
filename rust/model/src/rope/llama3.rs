//! RoPE scaling of Llama 3.1: by wavelength, with a smooth transition between kept and divided frequencies.

use std::f64::consts::TAU;

use serde::{Deserialize, Serialize};

use super::positive;
use crate::limits::{SpecError, require};

/// RoPE scaling of Llama 3.1.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Llama3 {
    /// Divisor of the frequencies of long waves.
    pub factor: f64,
    /// Waves longer than the original context divided by this are scaled.
    pub low_freq_factor: f64,
    /// Waves shorter than the original context divided by this are kept.
    pub high_freq_factor: f64,
    /// Length of the original context in tokens.
    pub original_max_position_embeddings: usize,
}

impl Llama3 {
    pub(super) fn check(&self, path: &str) -> Result<(), SpecError> {
        positive(&format!("{path}.factor"), self.factor)?;
        positive(&format!("{path}.low_freq_factor"), self.low_freq_factor)?;
        let (low, high) = (self.low_freq_factor, self.high_freq_factor);
        require(&format!("{path}.high_freq_factor"), high, high.is_finite() && high > low, || {
            format!("finite and above low_freq_factor ({low})")
        })?;
        positive(&format!("{path}.original_max_position_embeddings"), self.original_max_position_embeddings as f64)
    }

    pub(super) fn scale(&self, frequency: f64) -> f64 {
        let waves = self.original_max_position_embeddings as f64 * frequency / TAU;
        if waves > self.high_freq_factor {
            return frequency;
        }
        if waves < self.low_freq_factor {
            return frequency / self.factor;
        }
        let smooth = (waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor);
        (1.0 - smooth) * frequency / self.factor + smooth * frequency
    }
}
