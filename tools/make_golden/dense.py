"""Variants of decoders without experts."""

from pathlib import Path
from typing import Any

import torch
from checkpoint import JsonObject, Tensors, old_spelling
from reference import VOCABULARY
from transformers import (
    BloomConfig,
    Cohere2Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    Olmo2Config,
    OlmoConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)
from variants import SLIDING_WINDOW, Variant, make_variant, rope, sizes


def falcon(**changes: Any) -> FalconConfig:
    """Falcon (Almazrouei et al. 2023), whose generations differ in almost every configuration switch."""
    fields: JsonObject = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_hidden_size": 96,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return FalconConfig(**{**fields, **changes})


def gpt2(**changes: object) -> JsonObject:
    """Dimensions under the names that GPT-2 and related families use."""
    return {
        "vocab_size": VOCABULARY,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }


def opt(**changes: Any) -> OPTConfig:
    """OPT (Zhang et al. 2022)."""
    return OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=96,
        max_position_embeddings=256,
        **changes,
    )


def old_gpt_neox(config: JsonObject) -> None:
    """Converts the fields to those of togethercomputer/RedPajama-INCITE-Base-3B-v1."""
    parameters = config.pop("rope_parameters")
    config["rotary_pct"] = parameters["partial_rotary_factor"]
    config["rotary_emb_base"] = parameters["rope_theta"]
    config["torch_dtype"] = config.pop("dtype")


def old_gemma3(config: JsonObject) -> None:
    """Converts the fields to those of google/gemma-3-1b-it."""
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters["full_attention"].pop("rope_theta")
    config["rope_scaling"] = parameters["full_attention"]
    config["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
    config["sliding_window_pattern"] = 3
    del config["layer_types"], config["_sliding_window_pattern"]


def old_bloom(config: JsonObject) -> None:
    """Converts the fields to those of bigscience/bloom."""
    config["n_embed"] = config.pop("hidden_size")
    config["num_attention_heads"] = config.pop("n_head")


def old_phi3(config: JsonObject) -> None:
    """Converts the fields to those of microsoft/Phi-4-mini-instruct."""
    old_spelling()(config)
    del config["rope_scaling"]["original_max_position_embeddings"]


def without_prefix(tensors: Tensors) -> Tensors:
    """Renames tensors to those of the base model, as in bigscience/bloom."""
    return {name.removeprefix("transformer."): value for name, value in tensors.items()}


def old_gpt2(tensors: Tensors) -> Tensors:
    """Renames tensors to those of the base model and adds each layer's mask, as in openai-community/gpt2."""
    mask = torch.ones(64, 64).tril()[None, None]
    return without_prefix(tensors) | {f"h.{layer}.attn.bias": mask.clone() for layer in range(2)}


def masks_and_frequencies(tensors: Tensors) -> Tensors:
    """Adds each layer's mask and rotary frequencies, as in EleutherAI's Pythia."""
    stored: Tensors = {}
    for layer in range(2):
        prefix = f"gpt_neox.layers.{layer}.attention."
        stored[prefix + "bias"] = torch.ones(64, 64, dtype=torch.bool).tril()[None, None]
        stored[prefix + "masked_bias"] = torch.tensor(-1e9)
        stored[prefix + "rotary_emb.inv_freq"] = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    return tensors | stored


def frequencies(tensors: Tensors) -> Tensors:
    """Adds each layer's rotary frequencies, as in the first conversions of Llama."""
    stored = {
        f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": 10000.0 ** -(torch.arange(0, 16, 2) / 16)
        for layer in range(2)
    }
    return tensors | stored


def phi4_mini(original: int) -> Variant:
    """Microsoft's Phi-4-mini: three quarters of a head are rotated, with separate factors beyond `original` tokens."""
    factors = {"short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.4], "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0]}
    return Variant(
        Phi3Config(
            **sizes(),
            original_max_position_embeddings=original,
            rope_parameters=rope("longrope", partial_rotary_factor=0.75, **factors),
            tie_word_embeddings=True,
        ),
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.0] * 6}},
        edit=old_phi3,
    )


CASES: dict[str, Variant] = {
    # tiiuae/falcon-40b: grouped queries, a norm for the attention and one for the feed-forward part.
    "falcon_40b": Variant(falcon(new_decoder_architecture=True, num_kv_heads=2)),
    # tiiuae/falcon-11B: one norm for both.
    "falcon_11b": Variant(
        falcon(
            new_decoder_architecture=True,
            num_kv_heads=2,
            num_ln_in_parallel_attn=1,
            rope_parameters=rope("default", 500042.0),
        )
    ),
    # tiiuae/falcon-rw-1b: ALiBi, one part after the other, biases, separate keys for all heads. The
    # eager attention of transformers 5.23 adds ALiBi twice, to the mask and to the scores.
    "falcon_rw": Variant(
        falcon(alibi=True, parallel_attn=False, multi_query=False, bias=True), {"alibi": False}, attention="sdpa"
    ),
    # bigscience/bloom has 112 heads, which is not a power of two.
    "bloom_6_heads": Variant(
        BloomConfig(vocab_size=VOCABULARY, hidden_size=48, n_layer=2, n_head=6, bos_token_id=1, eos_token_id=2),
        edit=old_bloom,
        edit_tensors=without_prefix,
    ),
    "mpt_6_heads": Variant(MptConfig(vocab_size=VOCABULARY, d_model=48, n_layers=2, n_heads=6, max_seq_len=256)),
    # mosaicml/mpt-7b-storywriter clips. transformers ignores that its ALiBi slopes reach twice as far.
    "mpt_clip": Variant(
        MptConfig(
            vocab_size=VOCABULARY,
            d_model=64,
            n_layers=2,
            n_heads=4,
            max_seq_len=256,
            attn_config={"clip_qkv": 0.8},
        ),
        {"attn_config": {"clip_qkv": None}},
    ),
    # facebook/opt-350m: norms after the residual sum, no final norm, embeddings of a different width.
    "opt_350m": Variant(opt(do_layer_norm_before=False, word_embed_proj_dim=32)),
    # facebook/galactica-125m: no biases, norms without weights.
    "opt_galactica": Variant(
        opt(activation_function="gelu", enable_bias=False, layer_norm_elementwise_affine=False),
        {"activation_function": "relu"},
    ),
    # togethercomputer/RedPajama-INCITE-Base-3B-v1: sequential blocks, the whole head is rotated.
    "gpt_neox_serial": Variant(
        GPTNeoXConfig(
            **sizes(), use_parallel_residual=False, rope_parameters=rope("default", partial_rotary_factor=1.0)
        ),
        {"use_parallel_residual": True},
        edit=old_gpt_neox,
        edit_tensors=masks_and_frequencies,
    ),
    "phi_qk_layernorm": Variant(PhiConfig(**sizes(), qk_layernorm=True)),
    # stabilityai/stablelm-2-12b.
    "stablelm_parallel": Variant(StableLmConfig(**sizes(), use_parallel_residual=True, qk_layernorm=True)),
    "gptj_inner": Variant(GPTJConfig(**gpt2(rotary_dim=12, n_inner=96)), {"rotary_dim": 8}),
    "gpt_bigcode_heads": Variant(GPTBigCodeConfig(**gpt2(multi_query=False))),
    "gpt2_published": Variant(GPT2Config(**gpt2(n_positions=64)), edit_tensors=old_gpt2),
    # stanford-crfm's GPT-2.
    "gpt2_inverse_layer": Variant(
        GPT2Config(**gpt2(n_inner=96, scale_attn_by_inverse_layer_idx=True)),
        {"scale_attn_by_inverse_layer_idx": False},
    ),
    # bigcode/starcoder2-3b.
    "starcoder2_sliding": Variant(Starcoder2Config(**sizes(), sliding_window=SLIDING_WINDOW), {"sliding_window": None}),
    # CohereLabs/c4ai-command-r7b-12-2024: every fourth layer has full attention and no rotary embedding.
    "cohere2_full": Variant(
        Cohere2Config(**sizes(num_hidden_layers=4), sliding_window=SLIDING_WINDOW, logit_scale=0.25),
        {"sliding_window_pattern": 2},
        edit=old_spelling("layer_types", "head_dim", sliding_window_pattern=4),
    ),
    # Qwen/Qwen2-7B with its window enabled in the layers from max_window_layers on.
    "qwen2_sliding": Variant(
        Qwen2Config(
            **sizes(num_hidden_layers=3), use_sliding_window=True, sliding_window=SLIDING_WINDOW, max_window_layers=1
        ),
        {"use_sliding_window": False},
        edit=old_spelling("layer_types"),
    ),
    # google/gemma-2b names the activation gelu, but uses its tanh approximation.
    "gemma_gelu": Variant(
        GemmaConfig(**sizes(), head_dim=32), edit=old_spelling(hidden_act="gelu", hidden_activation=None)
    ),
    # google/gemma-2-27b scales queries by a width other than head_dim; the soft caps are low enough to have an effect.
    "gemma2_caps": Variant(
        Gemma2Config(
            **sizes(),
            head_dim=16,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
            sliding_window=SLIDING_WINDOW,
        ),
        {"attn_logit_softcapping": None},
        edit=old_spelling("layer_types"),
    ),
    # google/gemma-3-4b-it: the global layers' positions are divided by 8.
    "gemma3_linear_rope": Variant(
        Gemma3TextConfig(
            **sizes(num_hidden_layers=3),
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=SLIDING_WINDOW,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            rope_parameters={
                "full_attention": rope("linear", 1e6, factor=8.0),
                "sliding_attention": rope("default"),
            },
        ),
        {"rope_scaling": None},
        edit=old_gemma3,
    ),
    "olmo2_bias": Variant(Olmo2Config(**sizes(), attention_bias=True)),
    "olmo_clip": Variant(OlmoConfig(**sizes(), clip_qkv=0.8), {"clip_qkv": None}),
    # ibm-granite/granite-3.3-2b-instruct.
    "granite_tied": Variant(
        GraniteConfig(
            **sizes(),
            tie_word_embeddings=True,
            embedding_multiplier=12.0,
            logits_scaling=8.0,
            residual_multiplier=0.22,
            attention_multiplier=0.4,
        ),
        {"attention_multiplier": 0.25},
        edit=old_spelling(),
    ),
    # microsoft/Phi-4-mini-instruct.
    "phi4_mini": phi4_mini(32),
    "phi4_mini_short": phi4_mini(128),
    # zai-org/glm-4-9b-hf.
    "glm": Variant(GlmConfig(**sizes(), head_dim=16), {"partial_rotary_factor": 1.0}, edit=old_spelling()),
    # zai-org/GLM-4-32B-0414: no biases.
    "glm4_no_bias": Variant(Glm4Config(**sizes(), head_dim=16, attention_bias=False)),
    "smollm3_sliding": Variant(
        SmolLM3Config(
            **sizes(num_hidden_layers=4),
            use_sliding_window=True,
            sliding_window=SLIDING_WINDOW,
            no_rope_layer_interval=2,
        ),
        {"layer_types": ["full_attention"] * 4},
    ),
    # mistralai/Mistral-7B-v0.3: no window, although the architecture supports one.
    "mistral_no_window": Variant(
        MistralConfig(**sizes(), sliding_window=None, rope_parameters=rope("default", 1e6)),
        {"sliding_window": SLIDING_WINDOW},
        edit=old_spelling("head_dim"),
    ),
    # mistralai/Mistral-Nemo-Base-2407: the total width of the heads differs from hidden_size.
    "mistral_nemo": Variant(MistralConfig(**sizes(), head_dim=24, sliding_window=None), edit=old_spelling()),
    "llama_yarn_attention_factor": Variant(
        LlamaConfig(
            **sizes(),
            rope_parameters=rope(
                "yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=1.5, beta_fast=16.0
            ),
        ),
        {"rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=16.0)},
    ),
    "llama_yarn_mscale": Variant(
        LlamaConfig(
            **sizes(),
            rope_parameters=rope(
                "yarn", factor=16.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=0.5
            ),
        ),
        {"rope_parameters": rope("yarn", factor=16.0, original_max_position_embeddings=16)},
    ),
    "llama_bias": Variant(LlamaConfig(**sizes(), attention_bias=True, mlp_bias=True)),
    # huggyllama/llama-7b leaves most fields at their defaults.
    "llama_old": Variant(
        LlamaConfig(**sizes(num_key_value_heads=4)),
        edit=old_spelling("head_dim", "num_key_value_heads", "attention_bias", "mlp_bias"),
        edit_tensors=frequencies,
    ),
    "llama_old_linear": Variant(
        LlamaConfig(**sizes(), rope_parameters=rope("linear", factor=4.0)),
        {"rope_scaling": None},
        edit=old_spelling("head_dim"),
    ),
}


def make(name: str, seed: int, out: Path) -> None:
    """Writes one case."""
    make_variant(CASES[name], seed, out)
