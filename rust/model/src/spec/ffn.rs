//! Feed-forward networks and mixtures of them.

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
    /// Of many networks a few for each token.
    Experts(ExpertsSpec),
}

/// down(activation(gate(x)) * up(x)) (Shazeer 2020), or down(activation(up(x))) without a gate.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DenseSpec {
    /// Width between.
    pub intermediate_size: usize,
    /// On the gate, or on up where there is none.
    pub activation: ActivationSpec,
    /// Whether there is a gate.
    pub gated: bool,
    /// Whether the projections add a bias.
    pub bias: bool,
    /// In place of the activation.
    pub clamp: Option<ClampSpec>,
}

/// gpt-oss's gate: g = min(gate, limit), u = clamp(up, -limit, limit), (u + 1) * g * sigmoid(alpha * g).
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ClampSpec {
    /// Factor within the sigmoid.
    pub alpha: f32,
    /// Largest magnitude.
    pub limit: f32,
}

/// A mixture of experts.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertsSpec {
    /// How many there are.
    pub experts: usize,
    /// How many run for a token.
    pub experts_per_token: usize,
    /// Each of them.
    #[serde(deserialize_with = "dense")]
    pub expert: DenseSpec,
    /// Which run.
    pub router: RouterSpec,
    /// A network that every token goes through.
    #[serde(deserialize_with = "dense_or_none")]
    pub shared: Option<DenseSpec>,
    /// Whether what it gives is multiplied by the sigmoid of a projection of the input.
    pub shared_gate: bool,
}

/// A network that may not be a mixture itself.
fn dense<'de, D: Deserializer<'de>>(json: D) -> Result<DenseSpec, D::Error> {
    match FfnSpec::deserialize(json)? {
        FfnSpec::Dense(dense) => Ok(dense),
        FfnSpec::Experts(_) => Err(D::Error::custom("a mixture of mixtures; experts are dense")),
    }
}

fn dense_or_none<'de, D: Deserializer<'de>>(json: D) -> Result<Option<DenseSpec>, D::Error> {
    match Option::<FfnSpec>::deserialize(json)? {
        None => Ok(None),
        Some(FfnSpec::Dense(dense)) => Ok(Some(dense)),
        Some(FfnSpec::Experts(_)) => Err(D::Error::custom("a mixture of mixtures; the shared network is dense")),
    }
}

/// How a mixture chooses experts for a token and weighs them. Scores are f32; ties go to the lowest id.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RouterSpec {
    /// From logits to scores.
    pub scoring: Scoring,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub normalize: bool,
    /// Factor on the weights.
    pub scale: f32,
    /// Whether the logits have a bias.
    pub bias: bool,
    /// Whether a bias takes part in the choice, but not in the weights (DeepSeek-V3).
    pub correction_bias: bool,
    /// Neighbouring experts form so many groups; only experts of the best ones are chosen.
    pub groups: usize,
    /// How many groups experts are chosen from.
    pub groups_chosen: usize,
    /// What a group is worth.
    pub group_score: GroupScore,
}

/// From a router's logits to scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Scoring {
    /// Over all experts.
    Softmax,
    /// Each on its own.
    Sigmoid,
    /// Over the chosen experts alone.
    SoftmaxOfChosen,
}

/// What a group of experts is worth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupScore {
    /// Its best score.
    Max,
    /// The sum of its best two.
    Top2,
}

/// The names of [`Activation`]s.
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
    /// Rows of the first matrix: gate and up, or up alone.
    pub(crate) fn inner_rows(&self) -> usize {
        if self.gated { 2 * self.intermediate_size } else { self.intermediate_size }
    }

    /// How the gate meets up.
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
        require(&format!("{path}.gated"), self.gated, self.gated, || "true where there is a clamp".to_owned())
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

/// More experts than any layer has.
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
