"""GLM-5 (GLM Team 2026): latent attention to the tokens that an indexer chooses, and DeepSeek-V3's experts."""

from dataclasses import replace

from ferrule.archs.config import Config
from ferrule.archs.experts import corrected_router, experts_after_dense, experts_by_layer_type, routed_experts
from ferrule.archs.latent import LATENT_EPS, latent_decoder
from ferrule.archs.spec import Attention, Indexer, LayerNorm, ModelSpec

INDEXER_TYPES = {"full": "full", "shared": "shared", "F": "full", "S": "shared"}
"""Whether a layer has an indexer or reuses the choice of the layer before, as `index_topk_pattern` may write it."""


def glm_moe_dsa(config: Config) -> ModelSpec:
    """Some layers reuse the tokens that the last indexer chose. Multi-token prediction layers are ignored."""
    config = config.spelled(n_routed_experts="num_local_experts").with_defaults(
        max_position_embeddings=202_752,
        rms_norm_eps=1e-5,
        q_lora_rank=2048,
        qk_nope_head_dim=192,
        v_head_dim=256,
        first_k_dense_replace=3,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        n_group=1,
        topk_group=1,
    )
    has_indexer = _layers_with_indexer(config)
    indexer = Indexer(
        heads=config.integer("index_n_heads", default=32),
        head_dim=config.integer("index_head_dim", default=128, low=config.integer("qk_rope_head_dim", default=64)),
        blocks=config.integer("index_topk", default=2048),
        k_norm=LayerNorm(LATENT_EPS),
    )

    def with_choice(index: int, attention: Attention) -> Attention:
        if has_indexer[index]:
            return replace(attention, indexer=replace(indexer, rope=attention.rope))
        return replace(attention, selection_layer=max(layer for layer in range(index) if has_indexer[layer]))

    experts = routed_experts(config, corrected_router(config))
    module = "model.layers.{layer}.self_attn.indexer"
    return latent_decoder(
        config,
        experts_by_layer_type(config, experts) or experts_after_dense(config, experts),
        interleaved=True,
        attention_of=with_choice,
        modules={
            "attention.indexer.q": f"{module}.wq_b",
            "attention.indexer.k": f"{module}.wk",
            "attention.indexer.k_norm": f"{module}.k_norm",
            "attention.indexer.weights": f"{module}.weights_proj",
        },
    )


def _layers_with_indexer(config: Config) -> list[bool]:
    """Returns whether each layer has an indexer itself: by list, by pattern, or by period and offset."""
    field = next((field for field in ("indexer_types", "index_topk_pattern") if field in config), None)
    if field is None:
        period = config.integer("index_topk_freq", default=1)
        first = config.integer("index_skip_topk_offset", default=2, low=0) - 1
        return [max(index - first, 0) % period == 0 for index in range(config.layers)]
    types = config.values[field]
    letters = list(types) if isinstance(types, str) else config.texts(field)
    kinds = [INDEXER_TYPES.get(letter) for letter in letters]
    if len(kinds) != config.layers or None in kinds or kinds[0] != "full":
        raise config.error(field, f"the types of {config.layers} layers, each full or shared, and the first full")
    return [kind == "full" for kind in kinds]
