"""CodeGen (Nijkamp et al. 2023): GPT-J with fused projections."""

from ferrule.archs.config import Config
from ferrule.archs.gpt2 import SPELLINGS
from ferrule.archs.gptj import gptj
from ferrule.archs.spec import ModelSpec
from ferrule.archs.tensors import fused

SHARDS = 4
"""The accelerators of the first training: each wrote its heads' queries, values and keys."""


def codegen(config: Config) -> ModelSpec:
    """A quarter of the heads' queries, values and keys follow one another, four times."""
    spelled = config.spelled(**SPELLINGS)
    if spelled.heads % SHARDS:
        raise spelled.error("num_attention_heads", f"a multiple of {SHARDS}")
    rows = spelled.heads // SHARDS * spelled.head_dim
    parts = {"attention.q": rows, "attention.v": rows, "attention.k": rows}
    return gptj(config, fused("transformer.h.{layer}.attn.qkv_proj", parts))
