"""Zamba 2 (Zyphra 2024): Mamba 2 in all layers; some of them share an attention and a network as well.

The attention reads the residual stream joined with the embedding. Its output passes the network and a matrix of the
layer, and is then added to the input of the layer's Mamba 2, not to the stream.
"""

from collections.abc import Mapping
from dataclasses import replace

from ferrule.archs.config import Config
from ferrule.archs.decoder import MODULES, decoder
from ferrule.archs.mamba2 import divisor, modules
from ferrule.archs.spec import (
    Attention,
    Block,
    Dense,
    HeadProjections,
    Layer,
    LowRank,
    Mamba2,
    ModelSpec,
    Projection,
    RmsNorm,
    Tensor,
)
from ferrule.archs.tensors import Fused, fused, tensors_named

_LAYER = "model.layers.{layer}"
_PERIODS = ["mamba", *(["mamba"] * 5 + ["hybrid"]) * 7]
_DEFAULT_KINDS = [*_PERIODS, *["mamba"] * 4, "hybrid", *["mamba"] * 3, "hybrid", *["mamba"] * 2]
_OUTPUT_EPS = 1e-5
"""Epsilon of the norm of Mamba's output, which config.json does not hold."""


def zamba2(config: Config) -> ModelSpec:
    """The widths of heads follow from their numbers."""
    config = config.with_defaults(max_position_embeddings=4096, rms_norm_eps=1e-5)
    kinds = _kinds(config)
    hidden, heads = config.integer("hidden_size"), config.heads
    if 2 * hidden % heads:
        raise config.error("num_attention_heads", f"a divisor of twice hidden_size ({2 * hidden})")
    if config.flag("use_long_context", default=False):
        config = config.with_values(max_position_embeddings=16_384)
    config = config.with_values(num_hidden_layers=len(kinds), head_dim=2 * hidden // heads)
    mixer = _mamba2(config)
    names = {
        **MODULES,
        "mamba2_norm": f"{_LAYER}.input_layernorm",
        **modules(f"{_LAYER}.mamba", mixer),
        "final_norm": "model.final_layernorm",
    }
    rotated = config.flag("use_mem_rope", default=False)
    spec = decoder(
        config,
        rotated=[rotated and kind == "hybrid" for kind in kinds],
        mixers=dict.fromkeys(range(len(kinds)), mixer),
        ffn=[None] * len(kinds),
        tied=True,
        modules=names,
    )
    return _with_shared_blocks(config, spec, [index for index, kind in enumerate(kinds) if kind == "hybrid"], names)


def _kinds(config: Config) -> list[str]:
    """Returns the kind of each layer; the list also gives their number."""
    config = config.spelled(layers_block_type="layer_types")
    kinds = config.texts("layers_block_type") or _DEFAULT_KINDS
    if any(kind not in ("mamba", "linear_attention", "hybrid") for kind in kinds):
        raise config.error("layers_block_type", "a list of mamba, linear_attention and hybrid")
    if config.integer("num_hidden_layers", default=len(kinds)) != len(kinds):
        raise config.error("num_hidden_layers", f"the number of layers in layers_block_type ({len(kinds)})")
    return kinds


def _mamba2(config: Config) -> Mamba2:
    heads, groups = config.integer("n_mamba_heads", default=8), config.integer("mamba_ngroups", default=1)
    inner = int(config.number("mamba_expand", default=2.0) * config.integer("hidden_size"))
    if inner % heads:
        raise config.error("n_mamba_heads", f"a divisor of mamba_expand * hidden_size ({inner})")
    return Mamba2(
        heads=heads,
        head_dim=inner // heads,
        groups=divisor(config, "mamba_ngroups", groups, heads),
        state_size=config.integer("mamba_d_state", default=64),
        taps=config.integer("mamba_d_conv", default=4),
        bias=config.flag("add_bias_linear", default=False),
        output_bias=config.flag("add_bias_linear", default=False),
        norm=RmsNorm(_OUTPUT_EPS),
        norm_groups=groups,
    )


def _with_shared_blocks(
    config: Config, spec: ModelSpec, hybrids: list[int], names: Mapping[str, str | Fused]
) -> ModelSpec:
    """Returns a spec whose hybrid layers have the shared blocks before their Mamba; the blocks take turns."""
    # The switch for tied embeddings is one for shared blocks as well.
    tied = config.flag("tie_word_embeddings", default=True)
    blocks = config.integer("num_mem_blocks", default=1) if tied else max(len(hybrids), 1)
    shared, layers = _shared_blocks(config, rope=0 if spec.ropes else None), list(spec.layers)
    for use, layer in enumerate(hybrids):
        owner = None if use < blocks else hybrids[use % blocks]
        (mamba,) = spec.layers[layer].blocks
        projection = Block("projection", Projection(), input="output")
        layers[layer] = Layer(
            (
                *(replace(block, weights_of=owner) for block in shared),
                projection,
                replace(mamba, input="stream_plus_output"),
            )
        )
    spec = replace(spec, layers=layers)
    tensors: dict[str, Tensor] = {}
    for use, layer in enumerate(hybrids):
        named = tensors_named(spec, {**names, **_hybrid_modules(layers[layer], hybrids[use % blocks], use)})
        tensors |= {role: tensor for role, tensor in named.items() if role.startswith(f"layers.{layer}.")}
    return replace(spec, tensors=tensors_named(spec, names, known=tensors))


def _shared_blocks(config: Config, rope: int | None) -> tuple[Block, Block]:
    """Returns the shared attention and network, with separate additions for each use."""
    norm = RmsNorm(config.number("rms_norm_eps"))
    rank = config.integer("adapter_rank", default=128)
    adapted = config.flag("use_shared_attention_adapter", default=False)
    if adapted and config.kv_heads != config.heads:
        raise config.unsupported("num_key_value_heads", f"num_attention_heads ({config.heads}) with attention adapters")
    width = config.head_dim
    attention = Attention(
        heads=config.heads,
        scale=(width / 2) ** -0.5,
        projections=HeadProjections(config.kv_heads, key_dim=width, value_dim=width),
        rope=rope,
    )
    network = Dense(
        config.integer("intermediate_size", default=4 * config.integer("hidden_size")),
        config.activation_named("hidden_act", default="gelu"),
        bias=config.flag("add_bias_linear", default=False),
    )
    return (
        Block(
            "attention",
            attention,
            norm,
            input="stream_and_embedding",
            low_rank=tuple(LowRank((role,), rank) for role in ("q", "k", "v")) if adapted else (),
        ),
        Block("ffn", network, norm, input="output", low_rank=(LowRank(("gate", "up"), rank),)),
    )


def _hybrid_modules(layer: Layer, owner: int, use: int) -> dict[str, str | Fused]:
    """Returns the module names of a hybrid layer, the `use`-th, whose shared blocks are stored in layer `owner`."""
    (mixer,), (network,) = layer.mixers(Mamba2), layer.mixers(Dense)
    width = network.intermediate_size
    shared = f"model.layers.{owner}.shared_transformer"
    attention, ffn = f"{shared}.self_attn", f"{shared}.feed_forward"
    adapters = [f"{attention}.linear_{role}_adapter_list.{use}" for role in ("q", "k", "v")]
    low_rank = {
        f"attention.low_rank.{index}.{half}": f"{name}.{number}"
        for index, name in enumerate(adapters)
        for number, half in enumerate(("a", "b"))
    }
    return {
        "attention_norm": f"{shared}.input_layernorm",
        **{f"attention.{role}": f"{attention}.{role}_proj" for role in ("q", "k", "v")},
        "attention.output": f"{attention}.o_proj",
        **low_rank,
        "ffn_norm": f"{shared}.pre_ff_layernorm",
        **fused(f"{ffn}.gate_up_proj", {"ffn.gate": width, "ffn.up": width}),
        "ffn.down": f"{ffn}.down_proj",
        "ffn.low_rank.0.a": f"{ffn}.gate_up_proj_adapter_list.{use}.0",
        "ffn.low_rank.0.b": f"{ffn}.gate_up_proj_adapter_list.{use}.1",
        "projection.output": f"{_LAYER}.linear",
        "mamba2_norm": f"{_LAYER}.mamba_decoder.input_layernorm",
        **modules(f"{_LAYER}.mamba_decoder.mamba", mixer),
    }
