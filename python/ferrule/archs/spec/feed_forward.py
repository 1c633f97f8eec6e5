"""Feed-forward mixers: one network, or a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ferrule.archs.spec.activation import Activation, Clamp, Xielu
from ferrule.archs.spec.norms import Norm


@dataclass(frozen=True)
class Dense:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate."""

    intermediate_size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    clamp: Clamp | None = None
    """Clamped gate in place of the activation."""
    xielu: Xielu | None = None
    """xIELU in place of the activation, in networks without a gate."""
    inner_norm: Norm | None = None
    """Norm of the input of `down`."""
    gate_scale: float = 1.0
    """Factor on the gate before its activation."""
    gate_cutoff: float | None = None
    """Cutoff of the gate before its activation, in standard deviations above the mean of the row: it is subtracted, and
    negative results become 0 (Gemma 3n)."""
    type: Literal["dense"] = "dense"


@dataclass(frozen=True)
class Router:
    """Router: chooses and weights a token's experts. Scores are f32; ties go to the lowest id."""

    norm: Norm | None = None
    """Norm of the router's input."""
    logit_scale: float = 1.0
    """Factor on the logits."""
    scoring: Literal["softmax", "sigmoid", "sqrt_softplus", "softmax_of_chosen", "sparse_mixer"] = "softmax"
    """Function from logits to scores, over all experts or over the chosen experts only; "sparse_mixer" is a softmax for
    each choice, over the experts that are left and nearly as good (Phi-3.5-MoE)."""
    normalize: bool = False
    """Whether the weights of the chosen experts are divided by their sum."""
    scale: float = 1.0
    """Factor on the weights."""
    expert_scales: bool = False
    """Whether the weight of each expert is multiplied by its own stored factor."""
    bias: bool = False
    """Whether the logits have a bias."""
    correction_bias: bool = False
    """Whether a bias takes part in the choice, but not in the weights (DeepSeek-V3)."""
    groups: int = 1
    """Number of expert groups; experts are chosen from the best groups only."""
    groups_chosen: int = 1
    """Number of groups from which experts are chosen."""
    group_score: Literal["max", "top2"] = "top2"
    """Score of a group: its best score, or the sum of its best two."""
    jitter: float = 0.0
    """Half of the distance from the best logit, relative to the logit, up to which "sparse_mixer" counts an expert."""
    weigh_input: bool = False
    """Whether the weight multiplies the expert's input instead of its output."""
    token_experts: bool = False
    """Whether the experts of a token come from a table by its id; scores only weight them (DeepSeek-V4)."""


@dataclass(frozen=True)
class Latent:
    """Latent of experts: a projection to it is their input, and their weighted sum is projected back (Nemotron 3)."""

    width: int
    bias: bool = False
    """Whether the projections have a bias."""


@dataclass(frozen=True)
class Experts:
    """Mixture of experts: the router chooses a few networks for each token; a shared expert may run for all."""

    experts: int
    experts_per_token: int
    expert: Dense
    router: Router = field(default_factory=Router)
    shared: Dense | None = None
    """Shared expert, which runs for every token."""
    shared_gate: bool = False
    """Whether the shared expert's output is multiplied by the sigmoid of a projection of the input."""
    norm: Norm | None = None
    """Norm of the experts' input, which is not the router's."""
    latent: Latent | None = None
    """Latent that the chosen experts read and write, but neither the router nor the shared expert."""
    type: Literal["experts"] = "experts"


Ffn: TypeAlias = Dense | Experts
