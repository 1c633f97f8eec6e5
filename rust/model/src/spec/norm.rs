//! Normalizations.

use serde::{Deserialize, Serialize};

use crate::limits::{SpecError, finite, require};

/// A normalization over the last axis.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum NormSpec {
    /// x / rms(x) * (weight + weight_offset); Zhang and Sennrich 2019.
    Rms {
        /// Added to the mean of squares.
        eps: f32,
        /// Added to the stored weight.
        weight_offset: f32,
        /// Whether there is a weight.
        weight: bool,
    },
    /// (x - mean) / std * (weight + weight_offset) + bias; Ba et al. 2016.
    Layer {
        /// Added to the variance.
        eps: f32,
        /// Added to the stored weight.
        weight_offset: f32,
        /// Whether there is a weight.
        weight: bool,
        /// Whether there is a bias.
        bias: bool,
    },
}

/// A normalization of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct HeadNormSpec {
    /// What is computed.
    pub norm: NormSpec,
    /// Over what.
    pub over: NormedOver,
    /// After the rotation, not before it.
    pub after_rope: bool,
}

/// What a normalization of queries and keys is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NormedOver {
    /// Each head, with one weight for all.
    Head,
    /// Each head, with a weight of its own.
    EachHead,
    /// All heads as one row.
    Heads,
}

impl NormSpec {
    /// Whether there are a weight and a bias.
    pub(crate) fn parameters(self) -> [bool; 2] {
        match self {
            Self::Rms { weight, .. } => [weight, false],
            Self::Layer { weight, bias, .. } => [weight, bias],
        }
    }
}

pub(super) fn check(path: &str, norm: Option<NormSpec>) -> Result<(), SpecError> {
    let Some(NormSpec::Rms { eps, weight_offset, .. } | NormSpec::Layer { eps, weight_offset, .. }) = norm else {
        return Ok(());
    };
    finite(&format!("{path}.weight_offset"), weight_offset)?;
    require(&format!("{path}.eps"), eps, eps.is_finite() && eps >= 0.0, || "finite and >= 0".to_owned())
}
