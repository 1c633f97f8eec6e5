"""`model_info`: facts and memory requirements from headers only; they agree with those of the loaded model."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fakes
from archs.specs import spec_of
from conftest import TINY
from faults.isolated import PROMISED_EXTRA_BYTES, assert_refused, run
from ferrule import LLM, ConfigError, InvalidParameterError, ModelFileError, ModelNotFoundError, model_info
from ferrule._api.info import LayerGroup, layer_groups, ranges, size_text
from ferrule._cli import main
from ferrule._cli.layers import frame_words, mixer_words
from ferrule._loading import has_weights
from ferrule._loading.shapes import find_shape
from ferrule._params.options import QUANTIZATIONS
from ferrule._text.parsers import reasoning_parser_for

GOLDEN = Path(__file__).parent / "golden" / "logits"
KINDS = ("deepseek_v3", "gemma3", "gpt2", "gpt_oss", "opt", "qwen3_moe", "xglm")
"""Latent attention, windows, positions, mixture of experts, tied and untied lm_head."""


@pytest.mark.native
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("case", KINDS)
def test_info_equals_loaded_model(case: str, quantization: str) -> None:
    options: dict[str, Any] = {"quantization": quantization, "threads": 1, "max_num_seqs": 3}
    before = model_info(GOLDEN / case, **options)
    with LLM(GOLDEN / case, **options) as llm:
        after = llm.info()
    common = before.keys() & after.keys()
    assert {name: before[name] for name in common} == {name: after[name] for name in common}
    assert common >= {"layers", "tokenizer", "parameters", "weight_bytes", "weight_bytes_per_token", "kv_windows"}
    memory = before["memory"]
    assert (memory["weights"], memory["vectors"]) == (after["weight_bytes"], after["vector_bytes"])
    assert memory["needed"] == sum(memory[part] for part in ("weights", "vectors", "kv_cache", "buffers"))
    assert before["fits"]


@pytest.mark.native
@pytest.mark.parametrize("case", ["gptq_asym_actorder", "fp8_block"])
def test_info_of_quantized_checkpoints(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    directory = GOLDEN.parent / "quantized" / case
    before = model_info(directory)
    with LLM(directory) as llm:
        after = llm.info()
    common = before.keys() & after.keys()
    assert {name: before[name] for name in common} == {name: after[name] for name in common}
    assert common >= {"stored_as", "conversion", "weight_bytes"}
    assert main(["info", str(directory)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"bits per weight; {before['stored_as']}; tensors: " in text
    assert " weights stored: " in text
    assert "; kept as stored if kernels support the format, else dequantized and re-quantized KV cache" in text


@pytest.mark.native
@pytest.mark.parametrize("case", ["bert_classifier", "modernbert", "gemma3"])
def test_info_of_encoders(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    directory = GOLDEN.parent / "encoders" / case
    before, in_pieces = model_info(directory), model_info(directory, max_num_batched_tokens=1)
    with LLM(directory) as llm:
        after = llm.info()
    assert {name: before[name] for name in before.keys() & after.keys()} == {
        name: after[name] for name in before.keys() & after.keys()
    }
    assert before["memory"]["buffers"] == in_pieces["memory"]["buffers"]
    assert main(["info", str(directory)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "bidirectional attention" in text
    assert ("classifier of 1 label; no lm_head" in text) == (case == "bert_classifier")


def test_parsers_are_detected_from_template(fake_engine: object, model_with: Callable[..., Path]) -> None:
    template = "{{ '<think>' }}{{ '</think>' }}{{ '<tool_call>' }}"
    info = model_info(model_with(tokenizer_config=json.dumps({"chat_template": template})))
    assert info["chat_template"]
    assert (info["tool_call_parser"], info["reasoning_parser"]) == ("hermes", reasoning_parser_for(template))
    assert info["reasoning_parser"] is not None
    info = model_info()
    assert (info["tool_call_parser"], info["reasoning_parser"]) == ("hermes", None), "its template reads no tools"


@pytest.mark.native
def test_checkpoint_bytes_exclude_headers() -> None:
    info = model_info(GOLDEN / "llama")
    file = GOLDEN / "llama" / "model.safetensors"
    header = 8 + struct.unpack("<Q", file.read_bytes()[:8])[0]
    assert info["checkpoint_bytes"] == file.stat().st_size - header
    assert model_info(GOLDEN / "llama", load_format="dummy")["checkpoint_bytes"] is None


MOST_BYTES = """
import json, pathlib, re, sys, time
import ferrule, ferrule._native, tokenizers

def peak():
    [kilobytes] = re.findall(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024

ferrule.model_info("tiny")  # imports what a first call needs
before, start = peak(), time.perf_counter()
info = ferrule.model_info(sys.argv[1], quantization="int4")
print(json.dumps([peak() - before, time.perf_counter() - start, info["parameters"], info["checkpoint_bytes"]]))
"""


@pytest.mark.native
def test_only_headers_of_large_files_are_read(tmp_path: Path) -> None:
    """A sparse file of 140 GB, so that reading a matrix would take memory and time."""
    config = json.loads((find_shape("llama-8b") / "config.json").read_text())
    sizes = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28_672}
    (tmp_path / "config.json").write_text(json.dumps({**config, **sizes}))
    shapes = {"model.embed_tokens": [128_256, 8192], "lm_head": [128_256, 8192], "model.norm": [8192]}
    for layer in range(80):
        block = f"model.layers.{layer}"
        shapes |= {f"{block}.self_attn.{name}_proj": [8192, 8192] for name in "qo"}
        shapes |= {f"{block}.self_attn.{name}_proj": [1024, 8192] for name in "kv"}
        shapes |= {f"{block}.mlp.{name}_proj": [28_672, 8192] for name in ("gate", "up")}
        shapes |= {f"{block}.mlp.down_proj": [8192, 28_672]}
        shapes |= {f"{block}.{name}_layernorm": [8192] for name in ("input", "post_attention")}
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    done = subprocess.run([sys.executable, "-c", MOST_BYTES, str(tmp_path)], capture_output=True, text=True, check=True)
    peak, seconds, parameters, checkpoint = json.loads(done.stdout)
    assert (parameters, checkpoint) == (70_552_387_584, end)
    assert peak < 24 << 20
    assert seconds < 5  # specified to take one second; fivefold slack


@pytest.mark.native
@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ConfigError, r"tensor .* must have shape .* for this config, got", {"intermediate_size": 100}),
        (ModelFileError, "no tensor", {"num_hidden_layers": 7}),
        (InvalidParameterError, "max_model_len must be an integer from 1 to 256, got 257", {}),
    ],
)
def test_info_raises_the_errors_of_loading(
    error: type[Exception], message: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    config = json.loads((GOLDEN / "llama" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    (tmp_path / "model.safetensors").write_bytes((GOLDEN / "llama" / "model.safetensors").read_bytes())
    options: dict[str, Any] = {} if changes else {"max_model_len": 257}
    for make in (LLM, model_info):
        with pytest.raises(error, match=message):
            make(GOLDEN / "llama" if not changes else tmp_path, **options)


@pytest.mark.native
def test_missing_weights_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((GOLDEN / "llama" / "config.json").read_text())
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        model_info(tmp_path)
    assert model_info(tmp_path, load_format="dummy")["parameters"] == model_info(GOLDEN / "llama")["parameters"]
    with pytest.raises(InvalidParameterError, match="load_format must be one of auto, dummy, got 'random'"):
        model_info(tmp_path, load_format="random")
    with pytest.raises(ModelNotFoundError):
        model_info(tmp_path / "nowhere")


MEASURE = "model_info(arguments[0], load_format='dummy')"
WARM_UP = "from ferrule import model_info; model_info(arguments[1], load_format='dummy')"


@pytest.mark.native
@pytest.mark.parametrize(
    ("case", "changes", "says"),
    [
        ("gpt2", {"n_positions": 1 << 28, "n_embd": 1 << 20}, "positions.weight needs 1125899906842624 bytes"),
        ("xglm", {"max_position_embeddings": 60_000, "d_model": 1 << 20}, "the table of positions needs"),
        (
            "llama",
            {"mlp_bias": True, "intermediate_size": 1 << 28, "num_hidden_layers": 16},
            "a vector needs 2147483648 bytes",
        ),
    ],
)
def test_vectors_exceeding_memory_are_rejected(case: str, changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    config = json.loads((GOLDEN / case / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    outcome = run(MEASURE, str(tmp_path), str(GOLDEN / "llama"), warm_up=WARM_UP)
    assert_refused(outcome, "InsufficientMemoryError", [says, "bytes are available"])


@pytest.mark.native
def test_measuring_large_vectors_allocates_nothing(tmp_path: Path) -> None:
    config = json.loads((GOLDEN / "llama" / "config.json").read_text())
    changes = {"hidden_size": 1 << 20, "head_dim": 1 << 18, "attention_bias": True, "mlp_bias": True}
    (tmp_path / "config.json").write_text(json.dumps(config | changes | {"intermediate_size": 1 << 22}))
    outcome = run(MEASURE, str(tmp_path), str(GOLDEN / "llama"), warm_up=WARM_UP)
    assert outcome.error is None, outcome.message
    assert outcome.extra_bytes < PROMISED_EXTRA_BYTES


@pytest.mark.native
def test_info_counts_states_of_hybrids(capsys: pytest.CaptureFixture[str]) -> None:
    directory = GOLDEN.parent / "variants" / "qwen3_5_text"
    short, long = (model_info(directory, max_model_len=length) for length in (64, 256))
    assert short["state_bytes"] == long["state_bytes"] > 0
    # A state does not grow with the context. One sequence has room for its state before and after a step and snapshots.
    per_token = short["kv_bytes_per_token"]
    assert short["memory"]["kv_cache"] == 64 * per_token + 4 * short["state_bytes"]
    assert long["memory"]["kv_cache"] == 256 * per_token + 4 * long["state_bytes"]
    assert main(["info", str(directory)]) == 0
    assert f"; states of {size_text(short['state_bytes'])} per sequence" in " ".join(capsys.readouterr().out.split())


@pytest.mark.native
def test_kv_cache_of_sliding_layers_is_limited_to_window() -> None:
    short, long = (model_info(GOLDEN / "gemma3", max_model_len=length)["memory"] for length in (64, 256))
    info = model_info(GOLDEN / "gemma3")
    (full,) = [group["bytes_per_token"] for group in info["kv_windows"] if group["window"] is None]
    (sliding,) = [group["bytes_per_token"] for group in info["kv_windows"] if group["window"] == 16]
    assert info["kv_bytes_per_token"] == full + sliding
    # The whole prompt is one chunk, so pages that leave the window are held until the chunk is computed.
    assert long["kv_cache"] - short["kv_cache"] == (256 - 64) * (full + sliding)
    long = model_info(GOLDEN / "gemma3", max_num_batched_tokens=16)["memory"]
    assert long["kv_cache"] == 256 * full + 48 * sliding  # a window and a chunk touch three pages


def verdict(monkeypatch: pytest.MonkeyPatch, *, available: int, **options: Any) -> tuple[bool, str]:
    """Returns the information about llama-8b with this number of bytes of memory."""
    from ferrule import _native

    measure = _native.measure

    def measured(spec: str, directory: str | None, given: str) -> str:
        figures = json.loads(measure(spec, directory, given))
        memory = figures["memory"]
        left = (available - memory["weights"] - memory["vectors"]) // 2
        held = max(left // figures["kv_bytes_per_token"], 0)
        figures["memory"] = {**memory, "available": available, "holds_tokens": min(held, figures["max_model_len"])}
        return json.dumps(figures)

    with monkeypatch.context() as patch:
        patch.setattr(_native, "measure", measured)
        info = model_info(find_shape("llama-8b"), load_format="dummy", **options)
    return info["fits"], info["verdict"]


@pytest.mark.native
def test_fit_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1 << 30
    assert verdict(monkeypatch, available=64 * gib) == (True, "The model fits, with sequences of 131,072 tokens.")
    fits, text = verdict(monkeypatch, available=16 * gib)
    assert fits
    assert text.startswith("The model fits, with sequences of up to ")
    assert text.endswith(
        "the KV cache of 131,072 tokens needs 16 GiB, more than half of the memory that the weights leave."
    )
    fits, text = verdict(monkeypatch, available=6 * gib)
    assert not fits
    assert text.startswith("The model does not fit: weights and buffers need 7.")
    assert "6 GiB are available. With quantization=int4 they need 4." in text
    fits, text = verdict(monkeypatch, available=2 * gib, quantization="int4")
    assert not fits
    assert text.endswith("It does not fit with any quantization.")


@pytest.mark.native
def test_insufficient_memory_is_known_before_loading(tmp_path: Path) -> None:
    """In a process with little memory, `model_info` reports the same problem as loading, but early."""
    code = """
import resource, sys
from ferrule import LLM, FerruleError, model_info
import ferrule._native, numpy, tokenizers
from ferrule._loading.shapes import find_shape
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
info = model_info(find_shape("llama-8b"), load_format="dummy")
print(info["fits"], info["memory"]["available"] <= 4 << 30)
try:
    LLM(find_shape("llama-8b"), load_format="dummy")
except FerruleError as error:
    print(type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "InsufficientMemoryError"]


USED = """
import json, pathlib, re, sys
import ferrule, ferrule._native, numpy, tokenizers

def anonymous():
    [kilobytes] = re.findall(r"RssAnon:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024

options = {"quantization": sys.argv[2], "load_format": "dummy", "max_model_len": 1024}
memory = ferrule.model_info(sys.argv[1], **options)["memory"]
bare = anonymous()
llm = ferrule.LLM(sys.argv[1], enable_prefix_caching=False, **options)
loaded = anonymous() - bare
params = ferrule.SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)
llm.generate({"prompt_token_ids": [7] * 1020}, params)
print(json.dumps([memory, loaded, anonymous() - bare]))
"""
SMALL: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
}


@pytest.mark.native
@pytest.mark.parametrize(
    ("shape", "quantization", "changes"),
    [
        ("llama-1b", "f32", {"head_dim": 64, "intermediate_size": 8192}),
        ("qwen3-moe-3b", "int8", {"head_dim": 64, "num_experts": 16}),
        ("deepseek-v2-3b", "int4", {"num_key_value_heads": 12, "n_routed_experts": 8}),
    ],
)
def test_needed_memory_equals_used_memory(
    shape: str, quantization: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    config = json.loads((find_shape(shape) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | SMALL | changes))
    child = [sys.executable, "-c", USED, str(tmp_path), quantization]
    memory, loaded, used = json.loads(subprocess.run(child, capture_output=True, text=True, check=True).stdout)
    weights = memory["weights"] + memory["vectors"]
    assert loaded == pytest.approx(weights, abs=8 << 20)
    between = memory["needed"] - weights
    assert between > 32 << 20
    assert used - loaded == pytest.approx(between, rel=0.25)


def test_identical_layers_are_grouped() -> None:
    groups = layer_groups(spec_of("gemma3"))
    assert [group.layers for group in groups] == [(0, 1, 2, 3, 4, 6), (5,)]
    assert [group.layer.attention.window for group in groups] == [16, None]
    assert [group.layers for group in layer_groups(spec_of("llama"))] == [(0, 1, 2)]


def test_ranges_of_consecutive_numbers() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == [(0, 2), (5, 5), (7, 8)]
    assert ranges([]) == []


def test_human_readable_sizes() -> None:
    texts = [size_text(count) for count in (0, 1023, 1024, 3 << 19, 140 << 30)]
    assert texts == ["0 B", "1023 B", "1 KiB", "1.5 MiB", "140 GiB"]


def words(case: str, **changes: object) -> list[tuple[str, str, str]]:
    """Lines of each kind of layer: attention, feed-forward network, and norms."""
    spec = spec_of(case, **changes)

    def shown(group: LayerGroup) -> tuple[str, str, str]:
        layer = group.layer
        (_, attention), (_, ffn) = (mixer_words(block.mixer, spec.ropes) for block in layer.blocks)
        return attention, ffn, frame_words(layer)

    return [shown(group) for group in layer_groups(spec)]


def test_layer_descriptions() -> None:
    (cohere,) = words("cohere")
    assert cohere[0].startswith("4 heads of 16, 2 key-value heads; ")
    assert "interleaved pairs" in cohere[0]
    assert cohere[2] == "layer norm before both blocks; parallel blocks"
    assert "sinks" in words("gpt_oss")[0][0]
    assert "clamped at 7 (alpha 1.702)" in words("gpt_oss")[0][1]
    limited = words("bailing_hybrid", expert_swiglu_limit_list=[0, 4])[1][1]
    assert "clamped at 4, gates at 4.07 (alpha 1)" in limited
    assert "no RoPE" in words("gpt2")[0][0]
    assert "ALiBi" in words("bloom")[0][0]
    assert "2 experts" not in words("qwen3_moe")[0][1]
    assert "rms norm after each block" in words("olmo2")[0][2]
    assert "residual scale 0.3" in words("granite")[0][2]
    dense, sparse = words("deepseek_v3")
    assert "latent attention of rank" in dense[0]
    assert dense[1].startswith("gated silu, ")
    assert "router: sigmoid" in sparse[1]
    assert "shared expert: gated silu" in sparse[1]


def test_descriptions_of_streams_and_ngrams() -> None:
    spec = spec_of("qwen4_exp")
    layer = spec.layers[0]
    kind, ngrams = mixer_words(layer.block("ngram").mixer, spec.ropes)
    assert kind == "n-grams"
    assert ngrams == "8 rows of 2, by hashes of up to 3 tokens; convolution over 4 tokens, 3 apart"
    mean = "1 block from a gated mean of all streams (rank 8) to each of them"
    assert frame_words(layer).endswith(f"1 block on all streams; {mean}; {mean}")


def test_descriptions_of_compressed_entries_and_mixed_streams() -> None:
    spec = spec_of("deepseek_v4")
    hashed, _, sparse = spec.layers
    kind, words = mixer_words(sparse.block("compressed_attention").mixer, spec.ropes)
    assert kind == "attention"
    assert words == (
        "4 heads of 16, keys are values; queries of rank 32; RoPE of 8 dimensions, base 160,000, interleaved pairs; "
        "window of 32; 8 entries of 4 tokens, overlapping; sinks; output of 2 groups of rank 16"
    )
    mix = "1 block from a weighted sum of all streams to their mix (20 iterations)"
    assert frame_words(sparse).endswith(f"{mix}; {mix}")
    assert "experts by token id" in mixer_words(hashed.block("ffn").mixer, spec.ropes)[1]


@pytest.mark.native
@pytest.mark.parametrize("case", sorted(path.name for path in GOLDEN.iterdir()))
def test_every_golden_model_is_described(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(GOLDEN / case)]) == 0
    text = capsys.readouterr().out
    assert "None" not in text
    assert "()" not in text
    assert "The model fits" in text


@pytest.mark.native
@pytest.mark.parametrize(
    ("case", "line"), [("lfm2", "  convolution gated, 3 tokens"), ("rwkv", "  channel mixing gated relu2, 96 wide")]
)
def test_long_labels_are_separated_from_their_text(case: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(GOLDEN.parent / "variants" / case)]) == 0
    assert f"\n{line}" in capsys.readouterr().out


def test_has_weights_requires_all_shards(tmp_path: Path) -> None:
    assert has_weights(TINY)
    assert not has_weights(tmp_path)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert not has_weights(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").touch()
    assert has_weights(tmp_path)


def test_info_creates_no_engine(fake_engine: type[fakes.Engine]) -> None:
    info = model_info(max_model_len=100)
    assert (info["model"], info["max_model_len"], info["fits"]) == ("tiny", 100, True)
