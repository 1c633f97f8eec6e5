"""HunYuan's MoE models (Tencent 2025): the dense models with experts and a shared expert."""

from ferrule.archs.config import MAX_EXPERTS, Config
from ferrule.archs.hunyuan_v1_dense import hunyuan_decoder
from ferrule.archs.spec import Dense, Experts, Ffn, ModelSpec, Router


def hunyuan_v1_moe(config: Config) -> ModelSpec:
    """Expert counts are one number for all layers or a list."""
    config = config.spelled(num_experts="num_local_experts", num_experts_per_tok="moe_topk")
    block = "model.layers.{layer}.mlp"
    return hunyuan_decoder(
        config,
        ffn=_ffns(config),
        modules={
            "ffn.router": f"{block}.gate.wg",
            "ffn.shared.gate": f"{block}.shared_mlp.gate_proj",
            "ffn.shared.up": f"{block}.shared_mlp.up_proj",
            "ffn.shared.down": f"{block}.shared_mlp.down_proj",
        },
    )


def _ffns(config: Config) -> list[Ffn]:
    dense = Dense(config.integer("intermediate_size"), config.activation)
    counts = zip(_by_layer(config, "num_experts"), _by_layer(config, "num_experts_per_tok"), strict=True)
    return [
        Experts(experts, chosen, expert=dense, router=Router(normalize=True), shared=dense)
        for experts, chosen in counts
    ]


def _by_layer(config: Config, field: str) -> list[int]:
    if not isinstance(config.values.get(field), list):
        return [config.experts(field, default=1)] * config.layers
    numbers = config.integers(field, low=1, high=MAX_EXPERTS)
    if len(numbers) != config.layers:
        raise config.error(field, f"an integer, or a list of {config.layers} integers")
    return numbers
