"""GGUF files of many architectures, written like llama.cpp's converters do, compared with transformers' results."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gguf_convert
import gguf_mixers
import gguf_named
from ferrule import LLM, ConfigError, ModelFileError, SamplingParams, UnsupportedModelError, model_info
from ferrule._loading import read_model_files
from ferrule.archs.spec import Attention
from gguf_convert import Named, convert
from gguf_mixers import mixer_metadata, mixer_tensors
from gguf_varied import varied_metadata
from quantized_files import read as stored
from quantized_files import write
from test_encoders import GOLDEN as ENCODERS
from test_encoders import far, read

pytestmark = pytest.mark.native

GOLDEN = Path(__file__).parent / "golden"
TOLERANCE = 1e-4
"""Tolerance, relative to the largest logit."""

CASES = [
    *("llama", "llama3_rope", "llama_linear", "llama_tied", "llama_yarn", "mixtral", "qwen2", "qwen2_moe", "qwen3"),
    *("qwen3_moe", "gemma", "gemma2", "gemma3", "phi", "phi3", "phi3_longrope", "gpt2", "gpt_neox", "gpt_bigcode"),
    *("bloom", "mpt", "falcon", "stablelm", "starcoder2", "olmo", "olmo2", "olmoe", "cohere", "cohere2", "glm4"),
    *("granite", "gpt_oss", "deepseek_v3"),
]

VARIANTS = [
    *("arcee", "bailing_moe_v2", "bloom_6_heads", "deepseek_v2_lite", "deepseek_v3_yarn", "dots1", "ernie4_5"),
    *("ernie4_5_moe", "exaone4", "exaone4_no_window", "exaone_moe", "falcon_11b", "falcon_40b", "gemma2_caps"),
    *("gemma3_linear_rope", "glm", "glm4_moe", "glm4_no_bias", "glm_moe_dsa", "gpt_neox_serial"),
    *("granite_tied", "granitemoe", "granitemoeshared", "hunyuan_v1_dense", "hunyuan_v1_moe", "jais2", "llama_bias"),
    *("minicpm3", "minimax_m2", "mistral_no_window", "mpt_6_heads", "mpt_clip", "nemotron", "olmo2_bias", "olmo3"),
    *("olmo_clip", "phi4_mini", "phi4_mini_short", "seed_oss", "stablelm_parallel", "youtu"),
]


MIXERS = [
    *("falcon_h1_norm", "falcon_mamba", "granitemoehybrid", "granitemoehybrid_dense", "granitemoehybrid_rope", "jamba"),
    *(
        "lfm2",
        "lfm2_moe",
        "mamba",
        "mamba2",
        "nemotron_h",
        "nemotron_h_latent",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_text",
    ),
    *("qwen3_next_dense",),
]


MINIMAX_FACTORS = [f"{block}_{factor}" for block in ("full_attn", "linear_attn", "mlp") for factor in ("alpha", "beta")]
VARIED = [
    *(
        "apertus",
        "bailing_hybrid",
        "gemma3n",
        "gemma4",
        "gemma4_e",
        "gemma4_kv",
        "gemma4_moe",
        "gemma4_ple",
        "granitemoe_swa",
        "hy_v3",
    ),
    *("kimi_linear", "mimo_v2_flash", "minimax_m3", "ministral3", "mistral3_ministral3", "mistral4", "phimoe"),
]


YARN: dict[str, Any] = {
    "rope_parameters": None,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 24.0},
}
"""Scaling of DeepSeek-V4's layers with entries, as in its published config.json."""


def changed_checkpoint(case: str, changes: Mapping[str, object], folder: Path) -> Path:
    """Copies a golden case to a folder, with other values in its config.json."""
    original = GOLDEN / "variants" / case
    config = json.loads((original / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copyfile(original / "model.safetensors", folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("case", VARIED)
def test_varied_families_equal_transformers(case: str, tmp_path: Path) -> None:
    check(GOLDEN / "variants" / case, tmp_path)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("bailing_hybrid", {"expert_swiglu_limit_list": [0, 0.02], "share_expert_swiglu_limit_list": [0, 0, 0.03]}),
        ("bitnet", {"hidden_act": "silu"}),
        ("deepseek_v4", {}),
        ("deepseek_v4", YARN),
        ("granite_swa", {"layer_rope_theta": [0, 10_000.0, 10_000.0, 10_000.0, 0]}),
        ("minimax", {f"{name}_factor": 1.2 if "alpha" in name else 1.0 for name in MINIMAX_FACTORS}),
        ("llama4", {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}),
        ("qwen4_exp", {"output_gate_type": "sigmoid", "ple_layer_ids": [1]}),
        ("qwen4_exp", {"output_gate_type": "sigmoid", "ple_layer_ids": []}),
    ],
)
def test_logits_equal_those_of_the_checkpoint(case: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """GGUF has no keys for some options: llama.cpp has constants, which differ from the reference's configuration."""
    checkpoint = changed_checkpoint(case, changes, tmp_path)
    vocab_size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    ids: list[int] = np.random.default_rng(0).integers(vocab_size, size=80).tolist()
    with LLM(checkpoint, quantization="f32", kv_cache_dtype="f32") as llm:
        expected = llm.logits(ids)
    with LLM(convert(checkpoint, tmp_path / "model.gguf"), quantization="f32", kv_cache_dtype="f32") as llm:
        np.testing.assert_allclose(llm.logits(ids), expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_gating_func": 2}, "expert_gating_func must be 4 .square root of softplus."),
        ({"attention.compress_ratios": [0, 16]}, "compress_ratios must be an integer, or a list of one for each of 3"),
        ({"attention.compress_ratios": [8, 16, 4]}, "compress_ratios must be the same for all layers with an indexer"),
        ({"swiglu_clamp_exp": [10.0, 7.0, 10.0]}, "swiglu_clamp_exp must be the same for all layers, and equal to"),
        ({"swiglu_clamp_shexp": [7.0] * 3}, "swiglu_clamp_exp must be the same for all layers, and equal to"),
        ({"swiglu_clamp_exp": [math.nan] * 3}, "swiglu_clamp_exp must be a list of finite numbers above 0"),
    ],
)
def test_unsupported_values_of_deepseek_v4(
    changes: Mapping[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(config: Mapping[str, Any]) -> dict[str, object]:
        return {**varied_metadata(config), **changes}

    monkeypatch.setattr(gguf_convert, "varied_metadata", changed)
    file = convert(GOLDEN / "variants" / "deepseek_v4", tmp_path / "model.gguf")
    with pytest.raises((ConfigError, UnsupportedModelError), match=message):
        model_info(file)


@pytest.mark.parametrize("case", MIXERS)
def test_hybrids_equal_transformers(case: str, tmp_path: Path) -> None:
    check(GOLDEN / "variants" / case, tmp_path)


def test_rates_of_decay_must_not_be_above_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files have -exp(x) of what checkpoints have."""
    monkeypatch.setattr(gguf_mixers, "stored_decay", np.exp)
    file = convert(GOLDEN / "variants" / "mamba2", tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match=r'"blk\.0\.ssm_a" must hold finite numbers <= 0, .*, got \d'):
        LLM(file, quantization="f32")


def test_inner_size_must_be_whole_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(config: Mapping[str, Any], kv_heads: int) -> dict[str, object]:
        return {**mixer_metadata(config, kv_heads), "ssm.inner_size": 129}

    monkeypatch.setattr(gguf_convert, "mixer_metadata", odd)
    file = convert(GOLDEN / "variants" / "mamba2", tmp_path / "model.gguf")
    with pytest.raises(
        ConfigError, match=r"mamba2\.ssm\.inner_size must be a multiple of ssm\.time_step_rank \(8\), got"
    ):
        model_info(file)


def test_layers_with_attention_are_equally_far_apart_in_jamba(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def moved(config: Mapping[str, Any], stored: Named) -> Named:
        for name, values in mixer_tensors(config, stored):
            yield name, values
            if name.endswith("o_proj.weight"):
                yield "blk.3.attn_output.weight", values
                yield "blk.0.attn_output.weight", values

    monkeypatch.setattr(gguf_convert, "mixer_tensors", moved)
    file = convert(GOLDEN / "variants" / "jamba", tmp_path / "model.gguf")
    with pytest.raises(
        UnsupportedModelError, match=r"jamba\.attention\.head_count_kv must be such that layers of kind"
    ):
        model_info(file)


@pytest.mark.parametrize("cutoffs", [[0.5, -math.inf], [math.inf] * 5, [math.nan] * 5])
def test_cutoffs_of_gates_must_be_numbers_for_all_layers(
    cutoffs: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(config: Mapping[str, Any]) -> dict[str, object]:
        return {**varied_metadata(config), "activation_sparsity_scale": cutoffs}

    monkeypatch.setattr(gguf_convert, "varied_metadata", changed)
    file = convert(GOLDEN / "variants" / "gemma3n", tmp_path / "model.gguf")
    with pytest.raises(
        ConfigError, match=r"gemma3n\.activation_sparsity_scale must be a list of 5 numbers, which may be -inf, got"
    ):
        model_info(file)


@pytest.mark.parametrize("case", VARIANTS)
def test_variants_equal_transformers(case: str, tmp_path: Path) -> None:
    check(GOLDEN / "variants" / case, tmp_path)


def test_layers_without_an_indexers_tensors_share_the_choice_of_an_earlier_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of GLM-5 from before `indexer.types` was added lack the key."""
    metadata = gguf_convert.metadata
    monkeypatch.setattr(
        gguf_convert, "metadata", lambda *given, **options: without("indexer.types", metadata(*given, **options))
    )
    check(GOLDEN / "variants" / "glm_moe_dsa", tmp_path)


def without(key: str, values: Iterable[tuple[str, object]]) -> Iterator[tuple[str, object]]:
    return ((name, value) for name, value in values if not name.endswith(key))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.indexer.types", [False, True, True], "must be true for the first layer, whose tensors"),
        ("attention.indexer.types", [True], "must be a list of 3 items that are true or false, got"),
        ("expert_gating_func", 1, "must be 2 .sigmoid. in this architecture"),
    ],
)
def test_unsupported_values_of_glm_dsa(
    key: str, value: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = gguf_convert.metadata

    def changed(*given: Any, **options: Any) -> Iterator[tuple[str, object]]:
        yield from without(key, metadata(*given, **options))
        yield f"glm-dsa.{key}", value

    monkeypatch.setattr(gguf_convert, "metadata", changed)
    file = convert(GOLDEN / "variants" / "glm_moe_dsa", tmp_path / "model.gguf")
    with pytest.raises((ConfigError, UnsupportedModelError), match=rf"glm-dsa\.{key} {message}"):
        model_info(file)


NGRAMS = {"output_gate_type": "sigmoid", "ple_layer_ids": [1]}
REFUSED: list[tuple[str, Mapping[str, object], str]] = [
    ("bailing_hybrid", {"expert_gating_func": 1}, "expert_gating_func must be 2 .sigmoid. in this architecture"),
    ("bailing_hybrid", {"expert_shared_feed_forward_length": 24}, "must be a multiple of expert_feed_forward_length"),
    ("bailing_hybrid", {"kda.head_dim": None}, r"kda\.head_dim must be an integer from 1 to \d+, but it is missing"),
    ("bailing_hybrid", {"kda.gate_lower_bound": None}, "gate_lower_bound must be a finite number .*but it is missing"),
    ("bailing_hybrid", {"kda.gate_lower_bound": 1.0}, "gate_lower_bound must be at most 0, got 1"),
    ("bailing_hybrid", {"kda.safe_gate": False}, "safe_gate must be true or omitted in this architecture"),
    ("bailing_hybrid", {"ssm.conv_kernel": None}, r"ssm\.conv_kernel must be an integer"),
    ("bailing_hybrid", {"swiglu_clamp_exp": [0.0, -1.0]}, r"swiglu_clamp_exp must be a list of finite numbers from 0"),
    ("minimax_m3", {"expert_gating_func": 1}, "expert_gating_func must be 2 .sigmoid. in this architecture"),
    ("minimax_m3", {"expert_weights_norm": False}, "expert_weights_norm must be true or omitted in this architecture"),
    ("minimax_m3", {"expert_shared_count": None}, "expert_shared_count must be an integer .*, but it is missing"),
    ("minimax_m3", {"leading_dense_block_count": 0}, r"tensor 'blk\.0\.indexer\.q_proj\.weight' is missing"),
    *(
        (
            "minimax_m3",
            {f"attention.indexer.{name}": None},
            rf"indexer\.{name} must be an integer from {low} to \d+, but it is missing",
        )
        for name, low in (("head_count", 1), ("key_length", 1), ("top_k", 1), ("block_size", 1), ("local_blocks", 0))
    ),
    ("qwen4_exp", {"attention.compress_ratios": None}, "compress_ratios must be an integer .*, but it is missing"),
    (
        "qwen4_exp",
        {"attention.compress_ratios": [0, 0, 3]},
        r"top_k must be a multiple of indexer_compress_ratio \(3\)",
    ),
    (
        "qwen4_exp",
        {"attention.indexer.head_count": None},
        r"indexer\.head_count must be an integer .*but it is missing",
    ),
    ("qwen4_exp", {"ple.layers": [0, 1]}, r"ple\.layers must be one layer, because files have one set of hashes"),
    ("qwen4_exp", {"ple.layers": [3]}, r"ple\.layers must be a list of integers from 0 to 2"),
    ("qwen4_exp", {"ple.layer_multipliers": None}, "layer_multipliers must be a list of 3 integers, but it is missing"),
    ("qwen4_exp", {"ple.layer_multipliers": [1, 3]}, r"layer_multipliers must be a list of 3 integers"),
    (
        "qwen4_exp",
        {"ple.head_offsets": [0, 97]},
        r"head_offsets must be sums of ple\.head_vocab_sizes, in order from 0",
    ),
    ("qwen4_exp", {"ple.heads_per_ngram": 1 << 28}, "heads_per_ngram must be an integer from 1 to 512, got 268435456"),
    (
        "qwen4_exp",
        {"embedding_length_per_layer_input": 1 << 28},
        "embedding_length_per_layer_input must be an integer from 1 to 33554432, got 268435456",
    ),
    ("qwen4_exp", {"ple.head_vocab_sizes": None}, r"head_offsets must be sums of ple\.head_vocab_sizes"),
    ("qwen4_exp", {"ple.eos_token_id": None}, r"ple\.eos_token_id must be a token id, because n-grams"),
    *(
        ("qwen4_exp", {key: None}, rf"{key} must be an integer .*, but it is missing")
        for key in ("ple.ngram_size", "ple.heads_per_ngram", "ple.conv_kernel", "embedding_length_per_layer_input")
    ),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_unsupported_or_missing_keys(
    case: str, changes: Mapping[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = gguf_convert.metadata

    def changed(*given: Any, **options: Any) -> Iterator[tuple[str, object]]:
        values = dict(original(*given, **options))
        prefix = next(iter(values)).partition(".")[0]
        values |= {f"{prefix}.{name}": value for name, value in changes.items()}
        return ((key, value) for key, value in values.items() if value is not None)

    monkeypatch.setattr(gguf_convert, "metadata", changed)
    file = convert(changed_checkpoint(case, NGRAMS if case == "qwen4_exp" else {}, tmp_path), tmp_path / "model.gguf")
    with pytest.raises((ConfigError, UnsupportedModelError), match=message):
        model_info(file)


def test_table_of_ngrams_with_too_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = gguf_convert.named_tensors
    monkeypatch.setattr(
        gguf_convert,
        "named_tensors",
        lambda *given: ((name, each[:800] if name.startswith("per_") else each) for name, each in named(*given)),
    )
    file = convert(changed_checkpoint("qwen4_exp", NGRAMS, tmp_path), tmp_path / "model.gguf")
    with pytest.raises(
        ConfigError, match=r"'per_layer_token_embd\.weight' must have from 888 to 4294967296 rows, got 800"
    ):
        model_info(file)


def test_quantized_table_of_ngrams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the table have one block each, of numbers that Q8_0 stores exactly."""
    checkpoint = changed_checkpoint("qwen4_exp", {**NGRAMS, "ple_embed_dim": 256}, tmp_path)
    tensors, random = stored(checkpoint), np.random.default_rng(0)
    for name, (_, shape, _) in list(tensors.items()):
        if "layers.0.ple.ple_embedding.ngram_embedding" in name:
            numbers = random.integers(-127, 128, (shape[0], 32)) / np.float32(64)
            numbers[:, 0] = 127 / 64
        elif name.startswith("model.layers.0.ple.") and name.endswith(("key_proj.weight", "value_proj.weight")):
            numbers = random.standard_normal((shape[0], 256)) / 16
        else:
            continue
        tensors[name] = ("F32", numbers.shape, numbers.astype(np.float32).tobytes())
    write(checkpoint, tensors)
    add_tensor = gguf_convert.add_tensor

    def add_quantized_table(writer: Any, name: str, values: Any, storage: str) -> None:
        add_tensor(writer, name, values, "Q8_0" if name.startswith("per_layer_token_embd") else storage)

    with LLM(checkpoint, quantization="f32", kv_cache_dtype="f32") as llm:
        expected = llm.logits(list(range(50)))
    monkeypatch.setattr(gguf_convert, "add_tensor", add_quantized_table)
    file = convert(checkpoint, tmp_path / "model.gguf")
    assert model_info(file)["table_bytes"] == 888 * 34
    with LLM(file, quantization="f32", kv_cache_dtype="f32") as llm:
        np.testing.assert_allclose(llm.logits(list(range(50))), expected, atol=1e-5 * np.abs(expected).max())


def test_attention_without_indexer_in_qwen4exp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compress ratio of 0 means that a layer attends to all tokens."""
    named = gguf_named.named_metadata
    ratios = {"attention.compress_ratios": [0] * 3}
    monkeypatch.setattr(gguf_convert, "named_metadata", lambda *given: {**named(*given), **ratios})
    file = convert(changed_checkpoint("qwen4_exp", NGRAMS, tmp_path), tmp_path / "model.gguf")
    (layer,) = (layer for layer in read_model_files(file).spec.layers if layer.mixers(Attention))
    assert layer.attention.indexer is None


@pytest.mark.parametrize(
    ("case", "tensor"),
    [
        ("bailing_hybrid", "ssm_f_a.weight"),
        ("minimax_m3", "indexer.k_norm.weight"),
        ("qwen4_exp", "ple_norm_key.weight"),
    ],
)
def test_missing_tensors_are_named(case: str, tensor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = gguf_convert.named_tensors
    monkeypatch.setattr(gguf_convert, "named_tensors", lambda *given: without(tensor, named(*given)))
    file = convert(changed_checkpoint(case, NGRAMS if case == "qwen4_exp" else {}, tmp_path), tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match=rf"blk\.\d\.{re.escape(tensor)}"):
        LLM(file, quantization="f32")


def test_published_tensors_of_ling_3(tmp_path: Path) -> None:
    """Queries of low rank, and another name of the delta nets' outputs than in transformers."""
    checkpoint = changed_checkpoint("bailing_hybrid", {"q_lora_rank": 8}, tmp_path)
    tensors = {
        re.sub(r"([02]\.attention)\.dense", r"\1.o_proj", name): each for name, each in stored(checkpoint).items()
    }
    at, random = "model.layers.1.attention", np.random.default_rng(0)
    _, (rows, columns), _ = tensors.pop(f"{at}.q_proj.weight")
    for name, shape in (("q_a_proj", (8, columns)), ("q_a_layernorm", (8,)), ("q_b_proj", (rows, 8))):
        values = random.standard_normal(shape, np.float32)
        tensors[f"{at}.{name}.weight"] = ("F32", shape, values.tobytes())
    write(checkpoint, tensors)
    with LLM(checkpoint, quantization="f32", kv_cache_dtype="f32") as llm:
        expected = llm.logits(list(range(50)))
    with LLM(convert(checkpoint, tmp_path / "model.gguf"), quantization="f32", kv_cache_dtype="f32") as llm:
        np.testing.assert_allclose(llm.logits(list(range(50))), expected, atol=1e-5 * np.abs(expected).max())


def test_rates_of_bailings_decay_must_not_be_below_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files have exp(x) of what checkpoints have."""
    change = gguf_named.changed
    monkeypatch.setattr(
        gguf_named, "changed", lambda name, values: change(name, values) * (-1 if name.endswith("A_log") else 1)
    )
    file = convert(GOLDEN / "variants" / "bailing_hybrid", tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match=r'"blk\.0\.ssm_a" must hold finite numbers >= 0, .*, got -\d'):
        LLM(file, quantization="f32")


@pytest.mark.parametrize("case", ["deepseek_v2_lite", "deepseek_v3_yarn", "youtu"])
def test_unsplit_latent_projections_equal_transformers(case: str, tmp_path: Path) -> None:
    check(GOLDEN / "variants" / case, tmp_path, split_latent=False)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    check(GOLDEN / "logits" / case, tmp_path)


def check(directory: Path, tmp_path: Path, *, split_latent: bool = True) -> None:
    file = convert(directory, tmp_path / "model.gguf", split_latent=split_latent)
    with np.load(directory / "golden.npz") as golden:
        ids: list[int] = golden["input_ids"].tolist()
        expected, greedy = golden["logits"], golden["greedy"].tolist()
        rows = golden["rows"] if "rows" in golden else slice(None)
    with LLM(file, quantization="f32", kv_cache_dtype="f32") as llm:
        logits = llm.logits(ids)[rows]
        params = SamplingParams(temperature=0, max_tokens=len(greedy), ignore_eos=True)
        continuation = llm.generate({"prompt_token_ids": ids}, params)[0].outputs[0].token_ids
    distance = float(np.abs(logits.astype(np.float64) - expected).max() / np.abs(expected).max())
    assert distance <= TOLERANCE
    assert continuation == greedy


@pytest.mark.parametrize("case", ["bert", "gemma3", "qwen3"])
def test_encoders_equal_transformers(case: str, tmp_path: Path) -> None:
    golden, texts = read(case)
    with LLM(convert(ENCODERS / case, tmp_path / "model.gguf"), quantization="f32", kv_cache_dtype="f32") as llm:
        for number, output in enumerate(llm.embed(texts, pooling="none")):
            assert far(output.outputs.embedding, golden[f"last_hidden_state_{number}"]) <= TOLERANCE
        if case == "bert":  # the file specifies mean pooling
            outputs = llm.embed(texts)
            assert far(np.stack([output.outputs.embedding for output in outputs]), golden["mean"]) <= TOLERANCE
