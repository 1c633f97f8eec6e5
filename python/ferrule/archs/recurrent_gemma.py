"""RecurrentGemma (Google DeepMind 2024): Griffin's RG-LRU in most layers, local attention in some."""

import struct

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.gemma import gemma_norm
from ferrule.archs.spec import Dense, Embedding, LmHead, ModelSpec, RgLru
from ferrule.archs.tensors import fused

_LAYER = "model.layers.{layer}"
_BLOCK = f"{_LAYER}.temporal_block"
_PERIOD = ["recurrent", "recurrent", "attention"]


def recurrent_gemma(config: Config) -> ModelSpec:
    """The network is half as wide as `intermediate_size`; the context is 8192 tokens by default."""
    config = config.with_defaults(max_position_embeddings=8192)
    period = config.texts("block_types") or _PERIOD
    if any(kind not in ("recurrent", "attention") for kind in period):
        raise config.error("block_types", "a list of recurrent and attention")
    kinds = [period[index % len(period)] for index in range(config.layers)]
    activation = config.activation_named("hidden_activation", default="gelu_pytorch_tanh")
    heads, hidden = config.heads, config.integer("hidden_size")
    channels = config.integer("lru_width", default=hidden)
    if channels % heads:
        raise config.error("lru_width", f"a multiple of num_attention_heads ({heads})")
    mixer = RgLru(channels, heads, taps=config.integer("conv1d_width", default=4), activation=activation)
    bias = config.flag("attention_bias", default=False)
    attending = [kind == "attention" for kind in kinds]
    window = config.integer("attention_window_size", default=2048)
    gates = {"input_gate": "input_gate", "decay_gate": "recurrent_gate"}
    stacked = {
        f"rg_lru.heads.{role}.{parameter}": fused(
            f"{_BLOCK}.rg_lru.{name}_{parameter}", "gate", transposed=parameter == "weight", stack=heads
        )["gate"]
        for role, name in gates.items()
        for parameter in ("weight", "bias")
    }
    return decoder(
        config,
        norm=gemma_norm(config),
        windows=[window if attends else None for attends in attending],
        rotated=attending,
        partial_rotary=0.5,
        qkv_bias=bias,
        output_bias=True,
        mixers={index: mixer for index, attends in enumerate(attending) if not attends},
        ffn=Dense(config.integer("intermediate_size", default=3 * hidden, low=2) // 2, activation, bias=True),
        embedding=Embedding(scale=_rounded(hidden**0.5)),
        lm_head=LmHead(
            tied=config.flag("tie_word_embeddings", default=True),
            softcap=config.number("logits_soft_cap", default=30.0),
        ),
        modules={
            **{f"{block}_norm": f"{_LAYER}.temporal_pre_norm" for block in ("attention", "rg_lru")},
            **{f"attention.{role}": f"{_BLOCK}.{role}_proj" for role in ("q", "k", "v")},
            "attention.output": f"{_BLOCK}.o_proj",
            "rg_lru.x": f"{_BLOCK}.linear_x",
            "rg_lru.gate": f"{_BLOCK}.linear_y",
            "rg_lru.kernel": f"{_BLOCK}.conv_1d",
            **stacked,
            "rg_lru.decay.weight": f"{_BLOCK}.rg_lru.recurrent_param",
            "rg_lru.output": f"{_BLOCK}.linear_out",
            "ffn_norm": f"{_LAYER}.channel_pre_norm",
            **{f"ffn.{role}": f"{_LAYER}.mlp_block.{role}_proj" for role in ("gate", "up", "down")},
            "final_norm": "model.final_norm",
        },
    )


def _rounded(number: float) -> float:
    """Rounds a number to bf16, as the reference stores it: to the nearest, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    bits += 0x7FFF + (bits >> 16 & 1)
    (rounded,) = struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))
    return rounded
