//! Llama 3.1's scaling: by wavelength, with a smooth passage between kept and divided frequencies.

use std::f64::consts::TAU;

use serde::{Deserialize, Serialize};

use super::positive;
use crate::limits::{SpecError, require};

/// Short waves stay, long waves are divided, with a smooth passage between.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Llama3 {
    /// Divides the frequencies of long waves.
    pub factor: f64,
    /// Waves longer than the original context over this are divided.
    pub low_freq_factor: f64,
    /// Waves shorter than the original context over this stay.
    pub high_freq_factor: f64,
    /// Tokens of the original context.
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
