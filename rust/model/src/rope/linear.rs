//! Linear scaling, or position interpolation (Chen et al. 2023).

use serde::{Deserialize, Serialize};

use super::positive;
use crate::limits::SpecError;

/// Linear scaling: positions are divided by a factor.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Linear {
    /// Ratio of the extended to the original context.
    pub factor: f64,
}

impl Linear {
    pub(super) fn check(&self, path: &str) -> Result<(), SpecError> {
        positive(&format!("{path}.factor"), self.factor)
    }

    pub(super) fn scale(&self, frequency: f64) -> f64 {
        frequency / self.factor
    }
}
