"""Idefics3 (Laurençon et al. 2024) and SmolVLM (Marafioti et al. 2025): SigLIP, pixel shuffle and one projection."""

from dataclasses import replace

from ferrule.archs.config import Config
from ferrule.archs.encoder import encoder
from ferrule.archs.spec import Dense, Embedding, LayerNorm, ModelSpec, TextProjection
from ferrule.archs.tensors import tensors_named

VISION_DEFAULTS = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


def idefics3(config: Config) -> ModelSpec:
    """The tower of Idefics3. The place of a patch in the table of positions is its token type.

    Patches are ordered so that those that the pixel shuffle joins follow each other.
    """
    vision = config.inner("vision_config").with_defaults(**VISION_DEFAULTS)
    side, channels = vision.integer("patch_size", high=1024), vision.integer("num_channels", high=16)
    image = vision.integer("image_size", low=side, high=1 << 14)
    patches = (image // side) ** 2
    block, base = "model.vision_model.encoder.layers.{layer}", "model.vision_model"
    tower = encoder(
        vision.with_values(vocab_size=1, max_position_embeddings=patches),
        norm=LayerNorm(vision.number("layer_norm_eps")),
        rotated=False,
        qkv_bias=True,
        output_bias=True,
        ffn=Dense(vision.integer("intermediate_size"), vision.activation, gated=False, bias=True),
        embedding=Embedding(tokens=False, width=channels * side**2, projection_bias=True, token_types=patches),
        modules={
            "embedding_projection": f"{base}.embeddings.patch_embedding",
            "token_types": f"{base}.embeddings.position_embedding",
            "attention_norm": f"{block}.layer_norm1",
            "attention.q": f"{block}.self_attn.q_proj",
            "attention.k": f"{block}.self_attn.k_proj",
            "attention.v": f"{block}.self_attn.v_proj",
            "attention.output": f"{block}.self_attn.out_proj",
            "ffn_norm": f"{block}.layer_norm2",
            "ffn.up": f"{block}.mlp.fc1",
            "ffn.down": f"{block}.mlp.fc2",
            "final_norm": f"{base}.post_layernorm",
        },
    )
    joined = config.integer("scale_factor", default=2, high=16) ** 2
    projection = TextProjection(config.inner("text_config").integer("hidden_size", default=4096), None, bias=False)
    whole = replace(tower, text_projections=[projection], merged_rows=joined)
    connector = tensors_named(
        whole, {"text_projections.0": "model.connector.modality_projection.proj"}, known=tower.tensors
    )
    return replace(whole, tensors=connector, prefixes=[("model.", "")])
