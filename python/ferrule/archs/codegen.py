"""CodeGen (Nijkamp et al. 2023): GPT-J with fused projections."""

from ferrule.archs.config import Config
from ferrule.archs.gpt2 import SPELLINGS
from ferrule.archs.gptj import gptj
from ferrule.archs.spec import ModelSpec
from ferrule.archs.tensors import fused

SHARDS = 4
"""Tensor-parallel ranks of the original training; each stored its heads' queries, values and keys."""


def codegen(config: Config) -> ModelSpec:
    """The fused tensor repeats queries, values and keys of a quarter of the heads four times."""
    spelled = config.spelled(**SPELLINGS)
    if spelled.heads % SHARDS:
        raise spelled.error("num_attention_heads", f"a multiple of {SHARDS}")
    rows = spelled.heads // SHARDS * spelled.head_dim
    parts = {"attention.q": rows, "attention.v": rows, "attention.k": rows}
    return gptj(config, fused("transformer.h.{layer}.attn.qkv_proj", parts))
