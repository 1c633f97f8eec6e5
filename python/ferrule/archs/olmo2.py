"""OLMo 2 (OLMo Team 2024): Llama with norms after the blocks; query and key norms over all heads."""

from collections.abc import Callable, Sequence

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import Ffn, HeadNorm, ModelSpec, RmsNorm, Rope

NORMS_AFTER = {
    "attention_post_norm": "model.layers.{layer}.post_attention_layernorm",
    "ffn_post_norm": "model.layers.{layer}.post_feedforward_layernorm",
}
"""Module names of the norms after the blocks in OLMo 2's checkpoints."""


def olmo2(
    config: Config,
    windows: Sequence[int | None] | None = None,
    rope_of: Callable[[str], Rope] | None = None,
    ffn: Ffn | None = None,
) -> ModelSpec:
    """Blocks have no pre-norms. The other arguments are those of `decoder`."""
    config = config.with_defaults(max_position_embeddings=2048, rms_norm_eps=1e-5)
    bias = config.flag("attention_bias", default=False)
    return decoder(
        config,
        norms="after",
        windows=windows,
        rope_of=rope_of,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=HeadNorm(RmsNorm(config.number("rms_norm_eps")), over="heads"),
        ffn=ffn,
        modules=NORMS_AFTER,
    )
