"""Architectures: one file each, which turns config.json into a ModelSpec, and one line in REGISTRY.

Code that a checkpoint brings along (`auto_map`, remote code) is never looked at.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace

from ferrule.archs.bloom import bloom
from ferrule.archs.codegen import codegen
from ferrule.archs.config import Config
from ferrule.archs.falcon import falcon
from ferrule.archs.gpt2 import gpt2
from ferrule.archs.gpt_bigcode import gpt_bigcode
from ferrule.archs.gpt_neox import gpt_neox
from ferrule.archs.gptj import gptj
from ferrule.archs.llama import llama
from ferrule.archs.mistral import mistral
from ferrule.archs.mpt import mpt
from ferrule.archs.opt import opt
from ferrule.archs.phi import phi
from ferrule.archs.qwen2 import qwen2
from ferrule.archs.qwen3 import qwen3
from ferrule.archs.stablelm import stablelm
from ferrule.archs.starcoder2 import starcoder2
from ferrule.archs.xglm import xglm
from ferrule.errors import UnsupportedModelError
from ferrule.spec import ModelSpec


@dataclass(frozen=True)
class Architecture:
    """What a checkpoint may call itself, and how its configuration is read."""

    name: str
    """The beginning of the classes in config.json's `architectures`; their endings say what stands on top."""
    model_type: str
    """In config.json's `model_type`, which decides where `architectures` is missing."""
    read: Callable[[Config], ModelSpec]


REGISTRY = (
    Architecture("Bloom", "bloom", bloom),
    Architecture("CodeGen", "codegen", codegen),
    Architecture("Falcon", "falcon", falcon),
    Architecture("GPT2", "gpt2", gpt2),
    Architecture("GPTBigCode", "gpt_bigcode", gpt_bigcode),
    Architecture("GPTNeoX", "gpt_neox", gpt_neox),
    Architecture("GPTJ", "gptj", gptj),
    Architecture("Llama", "llama", llama),
    Architecture("Mistral", "mistral", mistral),
    Architecture("Mpt", "mpt", mpt),
    Architecture("MPT", "mpt", mpt),  # as its makers called it
    Architecture("OPT", "opt", opt),
    Architecture("Phi", "phi", phi),
    Architecture("Qwen2", "qwen2", qwen2),
    Architecture("Qwen3", "qwen3", qwen3),
    Architecture("StableLm", "stablelm", stablelm),
    Architecture("Starcoder2", "starcoder2", starcoder2),
    Architecture("XGLM", "xglm", xglm),
)

ENDINGS = ("ForCausalLM", "LMHeadModel", "Model")
"""Of classes' names: what stands on top of the layers."""

SHARED = ("tie_word_embeddings",)
"""What stands beside `text_config` where it is not in it."""


def model_spec(config: Config) -> ModelSpec:
    """The spec of a checkpoint; of one that sees pictures too, that of the half that reads and writes text.

    Raises ConfigError for a value outside its limits, UnsupportedModelError for what ferrule does not run.
    """
    if "quantization_config" in config:
        method = config.inner("quantization_config").values.get("quant_method")
        raise UnsupportedModelError(
            f"{config.file}: quantization_config.quant_method is {method!r}; "
            "checkpoints must be unquantized: f32, f16 or bf16"
        )
    if "text_config" in config:
        outer, config = config, config.inner("text_config")
        shared = {field: outer.values[field] for field in SHARED if field in outer and field not in config}
        config = config.with_defaults(**{"model_type": "llama", **shared})  # LLaVA's files leave the type out
    spec = _find(config).read(config)
    return replace(spec, prefixes=_prefixes(spec))


def _prefixes(spec: ModelSpec) -> list[tuple[str, str]]:
    """Other names of the same tensors: saved without the head around the model, or as a part of one that sees."""
    base, dot, _ = spec.tensors["embedding.weight"].names[0].partition(".")
    base += dot
    wrapped = [(base, f"{base}language_model."), ("", "language_model.")]
    return [(base, ""), *wrapped]


def _find(config: Config) -> Architecture:
    classes = config.texts("architectures")
    if classes:
        field, found, known = "architectures", classes[0], {a.name + end: a for a in REGISTRY for end in ENDINGS}
    else:
        field, found, known = "model_type", config.text("model_type"), {a.model_type: a for a in REGISTRY}
    if found in known:
        return known[found]
    names = list(known) if not classes else [a.name + ENDINGS[0] for a in REGISTRY]
    nearest = difflib.get_close_matches(found, names, n=1, cutoff=0)
    names = [*nearest, *(name for name in names if name not in nearest)]
    raise UnsupportedModelError(f"{config.file}: {field} is {found!r}; ferrule runs {', '.join(names)} (nearest first)")
