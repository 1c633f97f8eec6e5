//! Feed-forward networks: dense, and mixture of experts.

use ferrule_kernels::activation::{Activation, Gating};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

use crate::limits::{SpecError, finite, require, size};

/// A feed-forward network.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FfnSpec {
    /// One network for every token.
    Dense(DenseSpec),
    /// Mixture of experts: a router chooses a few networks for each token.
    Experts(ExpertsSpec),
}

/// Dense network: `down(activation(gate(x)) * up(x))` (Shazeer 2020), or `down(activation(up(x)))` without a gate.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DenseSpec {
    /// Width of the inner layer.
    pub intermediate_size: usize,
    /// Activation of the gate, or of `up` if there is no gate.
    pub activation: ActivationSpec,
    /// Whether there is a gate projection.
    pub gated: bool,
    /// Whether the projections add a bias.
    pub bias: bool,
    /// Clamped gate used in place of the activation (gpt-oss).
    pub clamp: Option<ClampSpec>,
}

/// Clamped gate of gpt-oss: `(u + 1) * g * sigmoid(alpha * g)` with `g = min(gate, limit)` and `u = clamp(up, -limit,
/// limit)`.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ClampSpec {
    /// Factor inside the sigmoid.
    pub alpha: f32,
    /// Largest magnitude of gate and up.
    pub limit: f32,
}

/// A mixture of experts.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertsSpec {
    /// Number of experts.
    pub experts: usize,
    /// Number of experts that run for each token.
    pub experts_per_token: usize,
    /// Architecture of each expert.
    #[serde(deserialize_with = "dense")]
    pub expert: DenseSpec,
    /// Router that chooses the experts.
    pub router: RouterSpec,
    /// Shared expert: a network that runs for every token.
    #[serde(deserialize_with = "dense_or_none")]
    pub shared: Option<DenseSpec>,
    /// Whether the output of the shared expert is multiplied by the sigmoid of a projection of the input.
    pub shared_gate: bool,
}

/// Deserializes a network that must not be a mixture of experts.
fn dense<'de, D: Deserializer<'de>>(json: D) -> Result<DenseSpec, D::Error> {
    match FfnSpec::deserialize(json)? {
        FfnSpec::Dense(dense) => Ok(dense),
        FfnSpec::Experts(_) => Err(D::Error::custom("experts must be dense networks")),
    }
}

fn dense_or_none<'de, D: Deserializer<'de>>(json: D) -> Result<Option<DenseSpec>, D::Error> {
    match Option::<FfnSpec>::deserialize(json)? {
        None => Ok(None),
        Some(FfnSpec::Dense(dense)) => Ok(Some(dense)),
        Some(FfnSpec::Experts(_)) => Err(D::Error::custom("the shared expert must be a dense network")),
    }
}

/// Selection and weighting of the experts of a token. Scores are f32; ties go to the lowest expert id.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RouterSpec {
    /// Function from logits to scores.
    pub scoring: Scoring,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub normalize: bool,
    /// Factor on the weights of the chosen experts.
    pub scale: f32,
    /// Whether the router's logits have a bias.
    pub bias: bool,
    /// Whether a bias is added to the scores for the choice of experts but not for their weights (DeepSeek-V3).
    pub correction_bias: bool,
    /// Number of groups of consecutive experts; only experts of the best groups are chosen.
    pub groups: usize,
    /// Number of groups that experts are chosen from.
    pub groups_chosen: usize,
    /// Score of a group.
    pub group_score: GroupScore,
}

/// Function from a router's logits to scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Scoring {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each logit.
    Sigmoid,
    /// Softmax over the chosen experts only.
    SoftmaxOfChosen,
}

/// Score of a group of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupScore {
    /// The best score in the group.
    Max,
    /// The sum of the two best scores in the group.
    Top2,
}

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
        }
    }
}

impl DenseSpec {
    /// Returns the number of rows of the first matrix: gate and up, or only up.
    pub(crate) fn inner_rows(&self) -> usize {
        if self.gated { 2 * self.intermediate_size } else { self.intermediate_size }
    }

    /// Returns how the gate is applied to `up`.
    pub(crate) fn gating(&self) -> Gating {
        match self.clamp {
            Some(ClampSpec { alpha, limit }) => Gating::Clamped { alpha, limit },
            None => Gating::Plain(self.activation.into()),
        }
    }

    fn check(&self, path: &str) -> Result<(), SpecError> {
        size(&format!("{path}.intermediate_size"), self.intermediate_size)?;
        let Some(ClampSpec { alpha, limit }) = self.clamp else { return Ok(()) };
        finite(&format!("{path}.clamp.alpha"), alpha)?;
        finite(&format!("{path}.clamp.limit"), limit)?;
        require(&format!("{path}.gated"), self.gated, self.gated, || "true if there is a clamp".to_owned())
    }
}

impl FfnSpec {
    pub(super) fn check(&self, path: &str) -> Result<(), SpecError> {
        match self {
            Self::Dense(dense) => dense.check(path),
            Self::Experts(experts) => experts.check(path),
        }
    }
}

/// Upper limit for the number of experts, above that of any known model.
const MAX_EXPERTS: usize = 1 << 16;

impl ExpertsSpec {
    fn check(&self, path: &str) -> Result<(), SpecError> {
        let Self { experts, experts_per_token, expert, router, shared, shared_gate } = self;
        require(&format!("{path}.experts"), experts, (1..=MAX_EXPERTS).contains(experts), || {
            format!("in 1..={MAX_EXPERTS}")
        })?;
        expert.check(&format!("{path}.expert"))?;
        let path_of_router = format!("{path}.router");
        let RouterSpec { groups, groups_chosen, scale, .. } = *router;
        finite(&format!("{path_of_router}.scale"), scale)?;
        require(&format!("{path_of_router}.groups"), groups, groups > 0 && experts.is_multiple_of(groups), || {
            format!("a divisor of experts ({experts})")
        })?;
        require(
            &format!("{path_of_router}.groups_chosen"),
            groups_chosen,
            (1..=groups).contains(&groups_chosen),
            || format!("in 1..={groups}, the number of groups"),
        )?;
        let eligible = experts / groups * groups_chosen;
        require(
            &format!("{path}.experts_per_token"),
            experts_per_token,
            (1..=eligible).contains(experts_per_token),
            || format!("in 1..={eligible}, the experts that may be chosen"),
        )?;
        if let Some(shared) = shared {
            shared.check(&format!("{path}.shared"))?;
        }
        require(&format!("{path}.shared_gate"), shared_gate, !shared_gate || shared.is_some(), || {
            "false where no network is shared".to_owned()
        })
    }
}
