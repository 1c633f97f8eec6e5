"""Mamba (Gu and Dao 2023): layers of one mixer each, and what hybrids with Mamba share."""

from ferrule.archs.config import Config
from ferrule.archs.mamba2 import BACKBONE, stack
from ferrule.archs.spec import Mamba, ModelSpec, RmsNorm
from ferrule.archs.tensors import Fused, fused

_LAYER = "backbone.layers.{layer}"


def mamba(config: Config, inner_norm: RmsNorm | None = None) -> ModelSpec:
    """`inner_norm` is the norm of step sizes, keys and queries in families that have one."""
    config = config.with_defaults(max_position_embeddings=1 << 20)
    hidden = config.integer("hidden_size")
    mixer = Mamba(
        channels=config.integer("intermediate_size", default=int(config.number("expand", default=2.0) * hidden)),
        state_size=config.integer("state_size", default=16),
        step_rank=step_rank(config, "time_step_rank"),
        taps=config.integer("conv_kernel", default=4),
        bias=config.flag("use_bias", default=False),
        kernel_bias=config.flag("use_conv_bias", default=True),
        norm=inner_norm,
    )
    norm = RmsNorm(config.number("layer_norm_epsilon", default=1e-5))
    names = {**BACKBONE, "mamba_norm": f"{_LAYER}.norm", **modules(f"{_LAYER}.mixer", mixer)}
    return stack(config, mixer, norm, names, tied=True)


def step_rank(config: Config, field: str) -> int:
    """Returns the rank of step sizes; a sixteenth of the hidden size by default."""
    if config.values.get(field, "auto") == "auto":
        return -(-config.integer("hidden_size") // 16)
    return config.integer(field)


def modules(at: str, mixer: Mamba) -> dict[str, str | Fused]:
    """Returns the module names of a Mamba mixer that is the module `at`."""
    inner = {"mamba.step_in": mixer.step_rank, "mamba.b": mixer.state_size, "mamba.c": mixer.state_size}
    return {
        **fused(f"{at}.in_proj", {"mamba.x": mixer.channels, "mamba.gate": mixer.channels}),
        "mamba.kernel": f"{at}.conv1d",
        **fused(f"{at}.x_proj", inner),
        "mamba.step_norm": f"{at}.dt_layernorm",
        "mamba.b_norm": f"{at}.b_layernorm",
        "mamba.c_norm": f"{at}.c_layernorm",
        "mamba.step": f"{at}.dt_proj",
        "mamba.step_bias.weight": f"{at}.dt_proj.bias",
        "mamba.decay_log.weight": f"{at}.A_log",
        "mamba.skip.weight": f"{at}.D",
        "mamba.output": f"{at}.out_proj",
    }
