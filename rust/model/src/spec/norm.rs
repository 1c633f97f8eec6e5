//! Normalization layers.

use serde::{Deserialize, Serialize};

use crate::limits::{SpecError, finite, require};

/// Normalization over the last axis.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum NormSpec {
    /// RMSNorm: `x / rms(x) * (weight + weight_offset)` (Zhang and Sennrich 2019).
    Rms {
        /// Epsilon added to the mean of squares.
        eps: f32,
        /// Constant added to the stored weight.
        weight_offset: f32,
        /// Whether there is a weight.
        weight: bool,
    },
    /// LayerNorm: `(x - mean) / std * (weight + weight_offset) + bias` (Ba et al. 2016).
    Layer {
        /// Epsilon added to the variance.
        eps: f32,
        /// Constant added to the stored weight.
        weight_offset: f32,
        /// Whether there is a weight.
        weight: bool,
        /// Whether there is a bias.
        bias: bool,
    },
}

/// Normalization of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct HeadNormSpec {
    /// Kind of norm.
    pub norm: NormSpec,
    /// Elements that one norm spans.
    pub over: NormedOver,
    /// Whether the norm follows the rotary embedding instead of preceding it.
    pub after_rope: bool,
}

/// Elements that a norm of queries or keys spans.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NormedOver {
    /// Each head on its own, with one weight shared by all heads.
    Head,
    /// Each head on its own, with a weight per head.
    EachHead,
    /// All heads together.
    Heads,
}

impl NormSpec {
    /// Returns whether there are a weight and a bias.
    pub(crate) fn parameters(self) -> [bool; 2] {
        match self {
            Self::Rms { weight, .. } => [weight, false],
            Self::Layer { weight, bias, .. } => [weight, bias],
        }
    }
}

/// Checks the numbers of a norm, if there is one.
pub(crate) fn check_norm(path: &str, norm: Option<NormSpec>) -> Result<(), SpecError> {
    let Some(NormSpec::Rms { eps, weight_offset, .. } | NormSpec::Layer { eps, weight_offset, .. }) = norm else {
        return Ok(());
    };
    finite(&format!("{path}.weight_offset"), weight_offset)?;
    require(&format!("{path}.eps"), eps, eps.is_finite() && eps >= 0.0, || "finite and >= 0".to_owned())
}
