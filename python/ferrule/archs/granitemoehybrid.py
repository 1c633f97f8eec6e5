"""Granite 4 (Granite Team, IBM 2025): Mamba 2 and attention, with experts and a shared network, or only that."""

from ferrule.archs.config import Config
from ferrule.archs.granite import granite
from ferrule.archs.granitemoeshared import granitemoeshared
from ferrule.archs.mamba2 import hybrid_mamba2, modules
from ferrule.archs.spec import Dense, Mamba2, ModelSpec, RmsNorm
from ferrule.archs.tensors import fused

_LAYER = "model.layers.{layer}"


def granitemoehybrid(config: Config) -> ModelSpec:
    """Attention has a rotary embedding only if `position_embedding_type` is rope."""
    config = config.with_defaults(rms_norm_eps=1e-6, shared_intermediate_size=1024)
    attending = _attending(config)
    mixers: dict[int, Mamba2] = {}
    names = {"mamba2_norm": f"{_LAYER}.input_layernorm"}
    more = {}
    if len(attending) < config.layers:
        mixer = hybrid_mamba2(config, norm=RmsNorm(config.number("rms_norm_eps")))
        mixers = {index: mixer for index in range(config.layers) if index not in attending}
        more = modules(f"{_LAYER}.mamba", mixer)
    rotated = config.values.get("position_embedding_type") == "rope"
    if config.integer("num_local_experts", default=8, low=0):
        return granitemoeshared(config, modules={**names, **more}, mixers=mixers, rotated=rotated)
    width = config.integer("shared_intermediate_size")
    block = f"{_LAYER}.shared_mlp"
    return granite(
        config,
        ffn=Dense(width, config.activation),
        modules={
            **names,
            **more,
            **fused(f"{block}.input_linear", {"ffn.gate": width, "ffn.up": width}),
            "ffn.down": f"{block}.output_linear",
        },
        mixers=mixers,
        rotated=rotated,
    )


def _attending(config: Config) -> list[int]:
    """Returns the layers with attention, from `layer_types`; none by default."""
    types = config.layer_kinds("layer_types", "linear_attention", "full_attention")
    return [index for index, kind in enumerate(types) if kind == "full_attention"]
