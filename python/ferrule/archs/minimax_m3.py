"""MiniMax-M3 (MiniMax 2026): attention to blocks of tokens that an indexer chooses, and clamped experts."""

from dataclasses import replace

from ferrule.archs.config import Config
from ferrule.archs.decoder import decoder
from ferrule.archs.spec import Attention, Clamp, Dense, Experts, HeadNorm, Indexer, ModelSpec, RmsNorm, Router

SPARSE = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}
"""Fields that published files have in `sparse_attention_config`, under other names."""
KINDS = ("full_attention", "minimax_m3_sparse")
FFN_KINDS = ("dense", "sparse")


def minimax_m3(config: Config) -> ModelSpec:
    """One choice of blocks for each head of keys and values.

    The rotated share of a head is `partial_rotary_factor`; `rotary_dim` is ignored, as in the reference.
    """
    sparse = config.inner("sparse_attention_config")
    config = config.spelled(num_local_experts="num_experts").with_defaults(
        head_dim=128,
        max_position_embeddings=524_288,
        rope_theta=5e6,
        **{field: sparse.values[name] for field, name in SPARSE.items() if name in sparse},
    )
    config = config.with_absent(num_key_value_heads=4).with_values(hidden_act="silu")
    norm = RmsNorm(config.number("rms_norm_eps", default=1e-6), weight_offset=1.0)
    clamp = Clamp(config.number("swiglu_alpha", default=1.702), config.number("swiglu_limit", default=7.0))
    is_sparse = _kinds(config, "layer_types", KINDS, sparse, "sparse_attention_freq", default=False)
    has_experts = _kinds(config, "mlp_layer_types", FFN_KINDS, config, "moe_layer_freq", default=True)
    indexer = Indexer(
        heads=config.integer("index_n_heads", default=4),
        head_dim=config.integer("index_head_dim", default=128),
        choice="each_head",
        block=config.integer("index_block_size", default=128),
        blocks=config.integer("index_topk_blocks", default=16),
        local_blocks=config.integer("index_local_blocks", default=1, low=0),
        q_norm=norm,
        k_norm=norm,
    )

    def with_choice(index: int, attention: Attention) -> Attention:
        return replace(attention, indexer=replace(indexer, rope=attention.rope)) if is_sparse[index] else attention

    dense = Dense(config.integer("dense_intermediate_size", default=12_288), clamp=clamp)
    experts = Experts(
        experts=config.experts("num_local_experts", default=128),
        experts_per_token=config.integer("num_experts_per_tok", default=4),
        expert=Dense(config.integer("intermediate_size"), clamp=clamp),
        router=Router(
            scoring="sigmoid",
            normalize=True,
            scale=config.number("routed_scaling_factor", default=2.0),
            correction_bias=True,
        ),
        shared=Dense(config.integer("shared_intermediate_size", default=3072), clamp=clamp),
    )
    block = "model.layers.{layer}"
    return decoder(
        config,
        norm=norm,
        qk_norm=HeadNorm(norm),
        partial_rotary=1.0,
        attention_of=with_choice,
        ffn=[experts if sparse else dense for sparse in has_experts],
        modules={
            "attention.indexer.q": f"{block}.self_attn.index_q_proj",
            "attention.indexer.k": f"{block}.self_attn.index_k_proj",
            "attention.indexer.q_norm": f"{block}.self_attn.index_q_norm",
            "attention.indexer.k_norm": f"{block}.self_attn.index_k_norm",
            "ffn.router": f"{block}.block_sparse_moe.gate",
            "ffn.router.correction_bias": f"{block}.block_sparse_moe.e_score_correction_bias",
            "ffn.experts.gate": f"{block}.block_sparse_moe.experts.{{expert}}.w1",
            "ffn.experts.up": f"{block}.block_sparse_moe.experts.{{expert}}.w3",
            "ffn.experts.down": f"{block}.block_sparse_moe.experts.{{expert}}.w2",
            "ffn.shared.gate": f"{block}.block_sparse_moe.shared_experts.gate_proj",
            "ffn.shared.up": f"{block}.block_sparse_moe.shared_experts.up_proj",
            "ffn.shared.down": f"{block}.block_sparse_moe.shared_experts.down_proj",
        },
    )


def _kinds(
    config: Config, field: str, kinds: tuple[str, str], source: Config, numbers: str, *, default: bool
) -> list[bool]:
    """Returns whether each layer is of the second kind: by names, or by numbers 0 and 1 under another name."""
    names = config.layer_kinds(field, *kinds)
    if names or numbers not in source:
        return [name == kinds[1] for name in names or [kinds[default]] * config.layers]
    flags = source.integers(numbers, low=0, high=1)
    if len(flags) != config.layers:
        raise source.error(numbers, f"a list of {config.layers} items, each 0 or 1")
    return [flag == 1 for flag in flags]
