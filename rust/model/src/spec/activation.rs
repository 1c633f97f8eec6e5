//! Activation functions.

use ferrule_kernels::activation::Activation;
use serde::{Deserialize, Serialize};

/// Activation function; see [`Activation`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationSpec {
    /// x * sigmoid(x)
    Silu,
    /// GELU by the error function.
    Gelu,
    /// GELU by its tanh approximation.
    GeluTanh,
    /// x * sigmoid(1.702 x)
    GeluQuick,
    /// max(x, 0)
    Relu,
    /// max(x, 0)^2
    Relu2,
    /// tanh(x)
    Tanh,
    /// 1 / (1 + e^-x)
    Sigmoid,
}

impl From<ActivationSpec> for Activation {
    fn from(spec: ActivationSpec) -> Self {
        match spec {
            ActivationSpec::Silu => Self::Silu,
            ActivationSpec::Gelu => Self::Gelu,
            ActivationSpec::GeluTanh => Self::GeluTanh,
            ActivationSpec::GeluQuick => Self::GeluQuick,
            ActivationSpec::Relu => Self::Relu,
            ActivationSpec::Relu2 => Self::Relu2,
            ActivationSpec::Tanh => Self::Tanh,
            ActivationSpec::Sigmoid => Self::Sigmoid,
        }
    }
}
