"""gpt-oss (OpenAI 2025): sinks, windows on every other layer, and experts with clamped gates and biases.

Checkpoints are in bf16, or have MXFP4 experts under the same names.
"""

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder, layer_windows
from ferrule.archs.spec import Clamp, Dense, Experts, ModelSpec, Router
from ferrule.archs.tensors import fused

YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
"""Default rotary embedding."""


def gpt_oss(config: Config) -> ModelSpec:
    """Rows of gate and up projections alternate."""
    config = config.spelled(num_local_experts="num_experts")
    config = config.with_defaults(
        head_dim=64, max_position_embeddings=131_072, rms_norm_eps=1e-5, rope_parameters=YARN, rope_theta=150_000.0
    ).with_absent(num_key_value_heads=8, sliding_window=128)
    bias = config.flag("attention_bias", default=True)
    experts = config.experts("num_local_experts", default=128)
    clamp = Clamp(alpha=config.number("swiglu_alpha", default=1.702), limit=config.number("swiglu_limit", default=7.0))
    block = "model.layers.{layer}.mlp"
    weights, biases = ({f"ffn.experts.{role}.{kind}": 1 for role in ("gate", "up")} for kind in ("weight", "bias"))
    return decoder(
        config,
        windows=layer_windows(
            config, sliding=lambda index: index % 2 == 0, window=config.integer_or_none("sliding_window")
        ),
        qkv_bias=bias,
        output_bias=bias,
        sinks=True,
        ffn=Experts(
            experts=experts,
            experts_per_token=config.integer("num_experts_per_tok", default=4),
            expert=Dense(config.integer("intermediate_size"), bias=True, clamp=clamp),
            router=Router(scoring="softmax_of_chosen", bias=True),
        ),
        modules={
            "attention.sinks.weight": "model.layers.{layer}.self_attn.sinks",
            "ffn.router": f"{block}.router",
            **fused(f"{block}.experts.gate_up_proj", weights, transposed=True, stack=experts),
            **fused(f"{block}.experts.gate_up_proj_bias", biases, stack=experts),
            **fused(f"{block}.experts.down_proj", "ffn.experts.down.weight", transposed=True, stack=experts),
            **fused(f"{block}.experts.down_proj_bias", "ffn.experts.down.bias", stack=experts),
        },
    )
