"""Architectures: one file each, which turns config.json into a ModelSpec, and one line in REGISTRY.

Packages may bring more: `register`, or an entry point of the group `ferrule.architectures`. Code that a checkpoint
brings along (`auto_map`, remote code) is never looked at. docs/add-an-architecture.md shows how to write one.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import cast

from ferrule.archs.apertus import apertus
from ferrule.archs.arcee import arcee
from ferrule.archs.bailing_hybrid import bailing_hybrid
from ferrule.archs.bailing_moe_v2 import bailing_moe_v2
from ferrule.archs.bamba import bamba
from ferrule.archs.bert import bert, bert_classifier
from ferrule.archs.biogpt import biogpt
from ferrule.archs.bitnet import bitnet
from ferrule.archs.bloom import bloom
from ferrule.archs.classifier import Classified, decoder_classifier, with_classifier
from ferrule.archs.codegen import codegen
from ferrule.archs.cohere import cohere
from ferrule.archs.cohere2 import cohere2
from ferrule.archs.config import Config
from ferrule.archs.cwm import cwm
from ferrule.archs.deepseek_v2 import deepseek_v2
from ferrule.archs.deepseek_v3 import deepseek_v3
from ferrule.archs.deepseek_v4 import deepseek_v4
from ferrule.archs.dots1 import dots1
from ferrule.archs.ernie4_5 import ernie4_5
from ferrule.archs.ernie4_5_moe import ernie4_5_moe
from ferrule.archs.exaone4 import exaone4
from ferrule.archs.exaone_moe import exaone_moe
from ferrule.archs.falcon import falcon
from ferrule.archs.falcon_h1 import falcon_h1
from ferrule.archs.falcon_mamba import falcon_mamba
from ferrule.archs.flex_olmo import flex_olmo
from ferrule.archs.gemma import gemma
from ferrule.archs.gemma2 import gemma2
from ferrule.archs.gemma3 import gemma3
from ferrule.archs.gemma3n import gemma3n
from ferrule.archs.gemma4 import gemma4
from ferrule.archs.glm import glm
from ferrule.archs.glm4 import glm4
from ferrule.archs.glm4_moe import glm4_moe
from ferrule.archs.glm4_moe_lite import glm4_moe_lite
from ferrule.archs.glm_moe_dsa import glm_moe_dsa
from ferrule.archs.gpt2 import gpt2
from ferrule.archs.gpt_bigcode import gpt_bigcode
from ferrule.archs.gpt_neo import gpt_neo
from ferrule.archs.gpt_neox import gpt_neox
from ferrule.archs.gpt_oss import gpt_oss
from ferrule.archs.gptj import gptj
from ferrule.archs.granite import granite
from ferrule.archs.granite_swa import granite_swa
from ferrule.archs.granitemoe import granitemoe
from ferrule.archs.granitemoe_swa import granitemoe_swa
from ferrule.archs.granitemoehybrid import granitemoehybrid
from ferrule.archs.granitemoeshared import granitemoeshared
from ferrule.archs.helium import helium
from ferrule.archs.hunyuan_v1_dense import hunyuan_v1_dense
from ferrule.archs.hunyuan_v1_moe import hunyuan_v1_moe
from ferrule.archs.hy_v3 import hy_v3
from ferrule.archs.hyperclovax import hyperclovax
from ferrule.archs.internlm3 import internlm3
from ferrule.archs.jais2 import jais2
from ferrule.archs.jamba import jamba
from ferrule.archs.kimi_linear import kimi_linear
from ferrule.archs.lfm2 import lfm2
from ferrule.archs.lfm2_moe import lfm2_moe
from ferrule.archs.lfm3 import lfm3
from ferrule.archs.llama import llama
from ferrule.archs.llama4 import llama4
from ferrule.archs.mamba import mamba
from ferrule.archs.mamba2 import mamba2
from ferrule.archs.mimo_v2_flash import mimo_v2_flash
from ferrule.archs.minicpm3 import minicpm3
from ferrule.archs.minimax import minimax
from ferrule.archs.minimax_m2 import minimax_m2
from ferrule.archs.minimax_m3 import minimax_m3
from ferrule.archs.ministral import ministral
from ferrule.archs.ministral3 import ministral3
from ferrule.archs.mistral import mistral
from ferrule.archs.mistral4 import mistral4
from ferrule.archs.mixtral import mixtral
from ferrule.archs.modernbert import modernbert, modernbert_classifier
from ferrule.archs.mpt import mpt
from ferrule.archs.nemotron import nemotron
from ferrule.archs.nemotron_h import nemotron_h
from ferrule.archs.olmo import olmo
from ferrule.archs.olmo2 import olmo2
from ferrule.archs.olmo3 import olmo3
from ferrule.archs.olmo_hybrid import olmo_hybrid
from ferrule.archs.olmoe import olmoe
from ferrule.archs.opt import opt
from ferrule.archs.persimmon import persimmon
from ferrule.archs.phi import phi
from ferrule.archs.phi3 import phi3
from ferrule.archs.phimoe import phimoe
from ferrule.archs.qwen2 import qwen2
from ferrule.archs.qwen2_moe import qwen2_moe
from ferrule.archs.qwen3 import qwen3
from ferrule.archs.qwen3_5 import qwen3_5, qwen3_5_moe
from ferrule.archs.qwen3_moe import qwen3_moe
from ferrule.archs.qwen3_next import qwen3_next
from ferrule.archs.qwen4_exp import qwen4_exp
from ferrule.archs.qwen_vl import qwen2_vl, qwen3_vl, qwen3_vl_moe
from ferrule.archs.recurrent_gemma import recurrent_gemma
from ferrule.archs.roberta import roberta, roberta_classifier
from ferrule.archs.rwkv import rwkv
from ferrule.archs.seed_oss import seed_oss
from ferrule.archs.smollm3 import smollm3
from ferrule.archs.solar_open import solar_open
from ferrule.archs.spec import ModelSpec
from ferrule.archs.stablelm import stablelm
from ferrule.archs.starcoder2 import starcoder2
from ferrule.archs.text_model import text_config, with_embedding_as_lm_head
from ferrule.archs.vaultgemma import vaultgemma
from ferrule.archs.xglm import xglm
from ferrule.archs.youtu import youtu
from ferrule.archs.zamba2 import zamba2
from ferrule.errors import InvalidParameterError, UnsupportedModelError

CLASSIFIER = "ForSequenceClassification"
BASE = "Model"

GENERATOR_ENDINGS = ("ForCausalLM", "LMHeadModel", BASE, "ForConditionalGeneration", CLASSIFIER)
"""Endings of decoders' class names; the ending says what follows the layers."""
ENCODER_ENDINGS = (BASE, "ForMaskedLM", "ForPreTraining", CLASSIFIER)
"""Endings of encoders' class names; heads for pretraining are ignored."""


@dataclass(frozen=True)
class Architecture:
    """An architecture: the names that a checkpoint gives it, and the function that reads its configuration."""

    name: str
    """Beginning of the class names in config.json's `architectures`, for example "Llama"."""
    model_type: str
    """config.json's `model_type`, which decides if `architectures` is missing."""
    read: Callable[[Config], ModelSpec]
    endings: tuple[str, ...] = GENERATOR_ENDINGS
    """Endings of the class names that load, the usual one first."""
    classifier: Callable[[Config], Classified] = decoder_classifier
    """Reads the classifier of a class that ends in ForSequenceClassification."""
    layers_differ: bool = False
    """Whether `read` reads `per_layer_config`; other architectures refuse it."""


REGISTRY = (
    Architecture("Apertus", "apertus", apertus),
    Architecture("Arcee", "arcee", arcee),
    Architecture("BailingHybrid", "bailing_hybrid", bailing_hybrid),
    Architecture("BailingMoeV2", "bailing_moe_v2", bailing_moe_v2),
    Architecture("BailingMoeV3", "bailing_hybrid", bailing_hybrid),
    Architecture("Bamba", "bamba", bamba),
    Architecture("Bert", "bert", bert, ENCODER_ENDINGS, bert_classifier),
    Architecture("BioGpt", "biogpt", biogpt),
    Architecture("BitNet", "bitnet", bitnet),
    Architecture("Bloom", "bloom", bloom),
    Architecture("CodeGen", "codegen", codegen),
    Architecture("Cohere", "cohere", cohere),
    Architecture("Cohere2", "cohere2", cohere2),
    Architecture("Cwm", "cwm", cwm),
    Architecture("DeepseekV2", "deepseek_v2", deepseek_v2),
    Architecture("DeepseekV3", "deepseek_v3", deepseek_v3),
    Architecture("DeepseekV4", "deepseek_v4", deepseek_v4),
    Architecture("Dots1", "dots1", dots1),
    Architecture("Ernie4_5", "ernie4_5", ernie4_5),
    Architecture("Ernie4_5_Moe", "ernie4_5_moe", ernie4_5_moe),
    Architecture("Exaone4", "exaone4", exaone4),
    Architecture("ExaoneMoe", "exaone_moe", exaone_moe),
    Architecture("Falcon", "falcon", falcon),
    Architecture("FalconH1", "falcon_h1", falcon_h1),
    Architecture("FalconMamba", "falcon_mamba", falcon_mamba),
    Architecture("FlexOlmo", "flex_olmo", flex_olmo),
    Architecture("Gemma", "gemma", gemma),
    Architecture("Gemma2", "gemma2", gemma2),
    Architecture("Gemma3", "gemma3_text", gemma3),
    Architecture("Gemma3Text", "gemma3_text", gemma3),
    Architecture("Gemma3n", "gemma3n_text", gemma3n),
    Architecture("Gemma3nText", "gemma3n_text", gemma3n),
    Architecture("Gemma4", "gemma4_text", gemma4, layers_differ=True),
    Architecture("Gemma4Text", "gemma4_text", gemma4, layers_differ=True),
    Architecture("Glm", "glm", glm),
    Architecture("Glm4", "glm4", glm4),
    Architecture("Glm4Moe", "glm4_moe", glm4_moe),
    Architecture("Glm4MoeLite", "glm4_moe_lite", glm4_moe_lite),
    Architecture("GlmMoeDsa", "glm_moe_dsa", glm_moe_dsa),
    Architecture("GPT2", "gpt2", gpt2),
    Architecture("GPTBigCode", "gpt_bigcode", gpt_bigcode),
    Architecture("GPTNeo", "gpt_neo", gpt_neo),
    Architecture("GPTNeoX", "gpt_neox", gpt_neox),
    Architecture("GptOss", "gpt_oss", gpt_oss),
    Architecture("GPTJ", "gptj", gptj),
    Architecture("Granite", "granite", granite),
    Architecture("GraniteSWA", "granite_swa", granite_swa),
    Architecture("GraniteMoe", "granitemoe", granitemoe),
    Architecture("GraniteMoeSWA", "granitemoe_swa", granitemoe_swa),
    Architecture("GraniteMoeHybrid", "granitemoehybrid", granitemoehybrid),
    Architecture("GraniteMoeShared", "granitemoeshared", granitemoeshared),
    Architecture("Helium", "helium", helium),
    Architecture("HunYuanDenseV1", "hunyuan_v1_dense", hunyuan_v1_dense),
    Architecture("HunYuanMoEV1", "hunyuan_v1_moe", hunyuan_v1_moe),
    Architecture("HYV3", "hy_v3", hy_v3),
    Architecture("HyperCLOVAX", "hyperclovax", hyperclovax),
    Architecture("InternLM3", "internlm3", internlm3),
    Architecture("Jais2", "jais2", jais2),
    Architecture("Jamba", "jamba", jamba),
    Architecture("KimiLinear", "kimi_linear", kimi_linear),
    Architecture("Lfm2", "lfm2", lfm2),
    Architecture("Lfm2Moe", "lfm2_moe", lfm2_moe),
    Architecture("Lfm3", "lfm3", lfm3),
    Architecture("Llama", "llama", llama),
    Architecture("Llama4", "llama4_text", llama4),
    Architecture("MiMoV2Flash", "mimo_v2_flash", mimo_v2_flash),
    Architecture("Mamba", "mamba", mamba),
    Architecture("Mamba2", "mamba2", mamba2),
    Architecture("MiniCPM3", "minicpm3", minicpm3),
    Architecture("MiniMax", "minimax", minimax),
    Architecture("MiniMaxM2", "minimax_m2", minimax_m2),
    Architecture("MiniMaxM3Sparse", "minimax_m3_vl_text", minimax_m3),
    Architecture("Ministral", "ministral", ministral),
    Architecture("Ministral3", "ministral3", ministral3),
    Architecture("Mistral", "mistral", mistral),
    Architecture("Mistral4", "mistral4", mistral4),
    Architecture("Mixtral", "mixtral", mixtral),
    Architecture("ModernBert", "modernbert", modernbert, ENCODER_ENDINGS, modernbert_classifier),
    Architecture("Mpt", "mpt", mpt),
    Architecture("MPT", "mpt", mpt),  # as its makers called it
    Architecture("Nemotron", "nemotron", nemotron),
    Architecture("NemotronH", "nemotron_h", nemotron_h),
    Architecture("Olmo", "olmo", olmo),
    Architecture("Olmo2", "olmo2", olmo2),
    Architecture("Olmo3", "olmo3", olmo3),
    Architecture("Olmoe", "olmoe", olmoe),
    Architecture("OlmoHybrid", "olmo_hybrid", olmo_hybrid),
    Architecture("OPT", "opt", opt),
    Architecture("Persimmon", "persimmon", persimmon),
    Architecture("Phi", "phi", phi),
    Architecture("Phi3", "phi3", phi3),
    Architecture("Phimoe", "phimoe", phimoe),
    Architecture("PhiMoE", "phimoe", phimoe),  # as its makers called it
    Architecture("Qwen2", "qwen2", qwen2),
    Architecture("Qwen2_5_VL", "qwen2_5_vl_text", qwen2_vl),
    Architecture("Qwen2Moe", "qwen2_moe", qwen2_moe),
    Architecture("Qwen2VL", "qwen2_vl_text", qwen2_vl),
    Architecture("Qwen3", "qwen3", qwen3),
    Architecture("Qwen3_5", "qwen3_5_text", qwen3_5),
    Architecture("Qwen3_5Moe", "qwen3_5_moe_text", qwen3_5_moe),
    Architecture("Qwen3Moe", "qwen3_moe", qwen3_moe),
    Architecture("Qwen3Next", "qwen3_next", qwen3_next),
    Architecture("Qwen3VL", "qwen3_vl_text", qwen3_vl),
    Architecture("Qwen3VLMoe", "qwen3_vl_moe_text", qwen3_vl_moe),
    Architecture("Qwen4Exp", "qwen4_exp_text", qwen4_exp),
    Architecture("RecurrentGemma", "recurrent_gemma", recurrent_gemma),
    Architecture("Roberta", "roberta", roberta, ENCODER_ENDINGS, roberta_classifier),
    Architecture("Rwkv", "rwkv", rwkv),
    Architecture("SeedOss", "seed_oss", seed_oss),
    Architecture("SmolLM3", "smollm3", smollm3),
    Architecture("SolarOpen", "solar_open", solar_open),
    Architecture("StableLm", "stablelm", stablelm),
    Architecture("Starcoder2", "starcoder2", starcoder2),
    Architecture("VaultGemma", "vaultgemma", vaultgemma),
    Architecture("XGLM", "xglm", xglm),
    Architecture("XLMRoberta", "xlm-roberta", roberta, ENCODER_ENDINGS, roberta_classifier),
    Architecture("Youtu", "youtu", youtu),
    Architecture("Zamba2", "zamba2", zamba2),
)


ENTRY_POINTS = "ferrule.architectures"
"""The group under which installed packages name their `Architecture`s; looked at where no other reads a model."""

_registered: list[Architecture] = []


def register(architecture: Architecture) -> None:
    """Registers an architecture of another package in this process.

    It replaces an architecture that was registered earlier under the same name or model_type, so that a notebook cell
    may run again.

    Raises InvalidParameterError for a name or model_type of a built-in architecture.
    """
    if not isinstance(cast("object", architecture), Architecture):
        raise InvalidParameterError("architecture", architecture, "an Architecture")
    for field in ("name", "model_type"):
        value: str = getattr(architecture, field)
        if not value or any(getattr(each, field) == value for each in REGISTRY):
            raise InvalidParameterError(field, value, "a new name, which no built-in architecture has")
        _registered[:] = [each for each in _registered if getattr(each, field) != value]
    _registered.append(architecture)


def architectures() -> tuple[Architecture, ...]:
    """Returns the built-in and the registered architectures."""
    return (*REGISTRY, *_registered)


def model_spec(config: Config) -> ModelSpec:
    """Returns the spec of a checkpoint, or of the text model of a multimodal checkpoint.

    Raises ConfigError for a value outside its limits, UnsupportedModelError for an unsupported model or value.
    """
    whole = config
    if "text_config" in whole:
        config = text_config(whole)
    architecture, ending = _find(config)
    classes = [ending, *whole.texts("architectures")]
    if config is not whole and any(name.endswith(CLASSIFIER) for name in classes):
        raise whole.unsupported(
            "architectures", "a class that generates text (classifiers of multimodal models are not supported)"
        )
    if config.values.get("per_layer_config") and not architecture.layers_differ:
        raise config.unsupported(
            "per_layer_config", "missing, because all layers of this architecture have the same sizes"
        )
    spec = architecture.read(config)
    if config is not whole:
        spec = with_embedding_as_lm_head(whole, spec)
    if ending == CLASSIFIER:
        spec = with_classifier(spec, architecture.classifier(config))
    elif ending == BASE and spec.lm_head is not None and not spec.lm_head.tied:
        spec = replace(spec, lm_head=None)  # the base class has no lm_head
    return replace(spec, prefixes=_prefixes(spec))


def _prefixes(spec: ModelSpec) -> list[tuple[str, str]]:
    """Other prefixes of the same tensors: saved from the base class, or as part of a multimodal model."""
    base, dot, _ = spec.tensors["embedding.weight"].names[0].partition(".")
    base += dot
    wrapped = [(base, f"{base}language_model."), ("", "language_model."), (base, f"{base}text_model.")]
    return [(base, ""), *wrapped]


def _find(config: Config) -> tuple[Architecture, str]:
    """Returns the architecture and the ending of its class name."""
    classes = config.texts("architectures")
    kind, found = ("architecture", classes[0]) if classes else ("model_type", config.text("model_type"))
    known = _known(architectures(), by_class=bool(classes))
    failures: list[str] = []
    if found not in known:
        known |= _known(_installed(failures), by_class=bool(classes))
    if found in known:
        return known[found]
    usual = {each.name + each.endings[0] if classes else each.model_type: None for each, _ in known.values()}
    nearest = difflib.get_close_matches(found, usual, n=1, cutoff=0)
    names = [*nearest, *(name for name in usual if name not in nearest)]
    raise UnsupportedModelError(
        f"{config.file}: unsupported {config.path}{kind} {found!r}; supported (nearest first): {', '.join(names)}"
        + "".join(f"; {failure}" for failure in failures)
    )


def _known(found: Iterable[Architecture], *, by_class: bool) -> dict[str, tuple[Architecture, str]]:
    """Maps class names, or model types, to the architecture and the ending of its class name."""
    if by_class:
        return {each.name + ending: (each, ending) for each in found for ending in each.endings}
    return {each.model_type: (each, each.endings[0]) for each in found}


def _installed(failures: list[str]) -> Iterator[Architecture]:
    """Yields the architectures of installed packages; adds the reason to `failures` if one cannot be loaded."""
    from importlib.metadata import entry_points

    for entry in entry_points(group=ENTRY_POINTS):
        try:
            loaded = cast("Architecture", entry.load())
            register(loaded)
        except Exception as error:  # third-party code may raise anything
            failures.append(
                f"the entry point {entry.name} ({entry.value}) of {ENTRY_POINTS} cannot be loaded: "
                f"{type(error).__name__}: {error}"
            )
        else:
            yield loaded
