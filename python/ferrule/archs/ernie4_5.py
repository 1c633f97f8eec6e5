"""ERNIE 4.5's dense models (Baidu 2025): Llama with an interleaved rotary embedding."""

from collections.abc import Mapping, Sequence

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import Ffn, LmHead, ModelSpec


def ernie4_5(config: Config) -> ModelSpec:
    """`use_bias` sets all biases."""
    return ernie_decoder(config.with_defaults(head_dim=128).with_absent(num_key_value_heads=2))


def ernie_decoder(
    config: Config,
    ffn: Sequence[Ffn] | None = None,
    lm_head: LmHead | None = None,
    modules: Mapping[str, str] | None = None,
) -> ModelSpec:
    """Returns the spec of dense and MoE models; arguments are those of `decoder`."""
    config = config.with_defaults(max_position_embeddings=131_072, rms_norm_eps=1e-5, rope_theta=5e5)
    bias = config.flag("use_bias", default=False)
    return decoder(
        config,
        interleaved=True,
        qkv_bias=bias,
        output_bias=bias,
        ffn=ffn,
        mlp_bias=bias,
        lm_head=lm_head,
        tied=True,
        modules=modules,
    )
