"""Broken and unsupported adapters raise typed errors, and the model keeps working."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faults.isolated import assert_refused, folder_bytes, run
from lora_files import ADAPTERS, BASES, CONFIG, TENSORS, read_header

CASE = ADAPTERS / "llama_all"
BASE = BASES / "llama"
QUERY = "base_model.model.model.layers.0.self_attn.q_proj"
A, B = f"{QUERY}.lora_A.weight", f"{QUERY}.lora_B.weight"

WARM_UP = """
    from ferrule import LLM
    llm = LLM(arguments[1], threads=1)
    llm.load_lora_adapter("warm", arguments[2])
"""
LOAD = "llm.load_lora_adapter('broken', arguments[0])"
GO_ON = """
    try:
        llm.load_lora_adapter("broken", arguments[0])
    except ValueError:
        pass
    assert [adapter.name for adapter in llm.lora_adapters()] == ["warm"]
    llm.generate({"prompt_token_ids": [7, 8]}, lora_request="warm")
"""

Change = Callable[[Path], object]


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A valid adapter that tests then break."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name in (CONFIG, TENSORS):
        shutil.copy(CASE / name, folder / name)
        (folder / name).chmod(0o644)
    return folder


def config_with(**fields: Any) -> Change:
    """Replaces values in the adapter's configuration."""

    def change(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | fields))

    return change


def edited(change: Callable[[dict[str, Any]], object]) -> Change:
    """Replaces the header before the same data; bytes that tensors no longer use belong to an unused name."""

    def edit(folder: Path) -> None:
        raw = (folder / TENSORS).read_bytes()
        data = raw[8 + int.from_bytes(raw[:8], "little") :]
        header = read_header(folder / TENSORS)
        change(header)
        text = json.dumps(header).encode()
        (folder / TENSORS).write_bytes(struct.pack("<Q", len(text)) + text + data)

    return edit


def renamed(old: str, new: str) -> Change:
    return edited(lambda header: header.update({new: header.pop(old)}))


def moved(module: str) -> Change:
    """Moves both matrices of a module to another module's name."""
    return edited(lambda header: header.update({module + name[len(QUERY) :]: header.pop(name) for name in (A, B)}))


def shaped(name: str, shape: list[int]) -> Change:
    return edited(lambda header: header[name].update(shape=shape))


def typed(dtype: str) -> Change:
    """Changes a matrix to half the columns with elements twice as wide."""
    return edited(lambda header: header[A].update(dtype=dtype, shape=[8, 32 if dtype == "I32" else 16]))


def without(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def only_pickles(folder: Path) -> None:
    (folder / TENSORS).unlink()
    (folder / "adapter_model.bin").write_bytes(b"\x80\x02}.")


def cut_short(folder: Path) -> None:
    os.truncate(folder / TENSORS, (folder / TENSORS).stat().st_size - 1)


def holds(content: str) -> Change:
    return lambda folder: (folder / CONFIG).write_text(content)


MORE: dict[str, tuple[Change, list[str]]] = {
    "another method": (config_with(peft_type="LOHA"), [CONFIG, "peft_type", "LOHA", '"LORA"']),
    "no method": (config_with(peft_type=None), [CONFIG, "peft_type", '"LORA"']),
    "dora": (config_with(use_dora=True), [CONFIG, "use_dora", "True", "off"]),
    "modules_to_save": (config_with(modules_to_save=["lm_head"]), [CONFIG, "modules_to_save", "lm_head", "off"]),
    "bias": (config_with(bias="all"), [CONFIG, "bias", "'all'", '"none"']),
    "lora_bias": (config_with(lora_bias=True), [CONFIG, "lora_bias", "off"]),
    "trained tokens": (config_with(trainable_token_indices=[1]), [CONFIG, "trainable_token_indices", "off"]),
    "repeated layers": (config_with(layer_replication=[[0, 2]]), [CONFIG, "layer_replication", "off"]),
    "parameters": (config_with(target_parameters=["experts.w1"]), [CONFIG, "target_parameters", "off"]),
    "activated by tokens": (config_with(alora_invocation_tokens=[5]), [CONFIG, "alora_invocation_tokens", "off"]),
    "pissa": (config_with(init_lora_weights="pissa_niter_4"), [CONFIG, "init_lora_weights", "pissa", "gaussian"]),
    "a switch of a later PEFT": (config_with(use_something=True), [CONFIG, "use_something", "True", "off"]),
    "a pattern for names": (config_with(rank_pattern={".*proj": 4}), [CONFIG, "rank_pattern", ".*proj", "names"]),
    "a costly pattern": (config_with(alpha_pattern={"(a+)+$": 4}), [CONFIG, "alpha_pattern", "(a+)+$", "names"]),
    "magnitudes": (renamed(A, f"{QUERY}.lora_magnitude_vector"), [TENSORS, "lora_magnitude_vector", "DoRA"]),
    "an embedding": (
        renamed(A, "base_model.model.model.embed_tokens.lora_embedding_A"),
        [TENSORS, "lora_embedding_A", "changes an embedding"],
    ),
    "a whole matrix": (renamed(A, "base_model.model.lm_head.weight"), [TENSORS, "lm_head.weight", "modules_to_save"]),
}
WRONG: dict[str, tuple[Change, list[str]]] = {
    "no object": (holds("[]"), [CONFIG, "[]", "an object"]),
    "no JSON": (holds("{"), [CONFIG, "not valid JSON"]),
    "deep JSON": (holds('{"r":' + "[" * 100_000), [CONFIG, "not valid JSON"]),
    "rank 0": (config_with(r=0), [CONFIG, "r must be an integer from 1 to 65536, got 0", "1 to 65536"]),
    "rank 1e9": (config_with(r=10**9), [CONFIG, "r must be an integer from 1 to 65536, got 1000000000", "1 to 65536"]),
    "rank NaN": (config_with(r=float("nan")), [CONFIG, "r must be an integer from 1 to 65536, got nan"]),
    "alpha missing": (config_with(lora_alpha=None), [CONFIG, "lora_alpha", "finite number"]),
    "alpha infinite": (
        config_with(lora_alpha=float("inf")),
        [CONFIG, "lora_alpha must be a finite number from 0, got inf", "finite"],
    ),
    "alpha beyond f32": (config_with(lora_alpha=1e300), [CONFIG, "lora_alpha", "got 3.5355", "at most 3.4028235e38"]),
    "alpha beyond f32 of one module": (
        config_with(alpha_pattern={"layers.0.self_attn.q_proj": 1e300}),
        [CONFIG, "alpha_pattern", '"model.layers.0.self_attn.q_proj"', "got 3.5355", "at most 3.4028235e38"],
    ),
    "a rank that is a word": (
        config_with(rank_pattern={"q_proj": "x"}),
        [CONFIG, "rank_pattern.q_proj must be an integer from 1 to 65536, got 'x'"],
    ),
    "ranks as a list": (config_with(rank_pattern=[4]), [CONFIG, "rank_pattern", "an object"]),
    "targets of another type": (config_with(target_modules=[5]), [CONFIG, "target_modules", "a list of strings"]),
    "layers of another type": (config_with(layers_to_transform="all"), [CONFIG, "layers_to_transform", "integers"]),
    "a layer below 0": (
        config_with(layers_to_transform=-1),
        [CONFIG, "layers_to_transform must be an integer from 0 to 4096, got -1"],
    ),
    "a target that the model lacks": (
        config_with(target_modules=["q_prj", "v_proj"]),
        [CONFIG, "target_modules", '"q_prj"', '"q_proj"'],
    ),
    "a module that is no target": (
        config_with(target_modules=["v_proj"]),
        [TENSORS, "target_modules", "does not name"],
    ),
    "a layer that is none": (config_with(layers_to_transform=[1, 2]), [TENSORS, "layers.0.", "does not name"]),
    "a target without tensors": (
        config_with(target_modules=[*json.loads((CASE / CONFIG).read_text())["target_modules"], "lm_head"]),
        [TENSORS, "lm_head.lora_A.weight", "is missing", "target_modules"],
    ),
    "A without B": (renamed(B, f"{QUERY[:-6]}x_proj.lora_B.weight"), [TENSORS, B, "is missing", "the other matrix"]),
    "a module that the model lacks": (
        lambda folder: [config_with(target_modules=None)(folder), moved(f"{QUERY}x")(folder)],
        [TENSORS, "q_projx", '"model.layers.0.self_attn.q_proj"'],
    ),
    "another rank": (config_with(r=4), [TENSORS, "lora_B.weight", "[64, 8]", "[64, 4]", "outputs, rank"]),
    "another base": (shaped(A, [16, 32]), [TENSORS, A, "[16, 32]", "[8, 64]", "rank, inputs"]),
    "outputs of another base": (shaped(B, [32, 16]), [TENSORS, B, "[32, 16]", "[64, 8]", "outputs, rank"]),
    "a name of another tool": (
        renamed(A, "lora_unet_q.lora_down.weight"),
        [TENSORS, "lora_unet_q", "base_model.model."],
    ),
}
BROKEN: dict[str, tuple[Change, list[str]]] = {
    "no tensors": (without(TENSORS), [TENSORS, "has no"]),
    "pickles": (only_pickles, ["adapter_model.bin", "pickle"]),
    "one byte short": (cut_short, [TENSORS, "1 bytes are missing"]),
    "integers": (typed("I32"), [TENSORS, A, "I32", "BF16"]),
    "f64": (typed("F64"), [TENSORS, A, "F64", "BF16"]),
    "empty": (lambda folder: (folder / TENSORS).write_bytes(b""), [TENSORS, "empty"]),
}
ALL = [
    pytest.param(error, *fault, id=name)
    for error, faults in (("UnsupportedModelError", MORE), ("ConfigError", WRONG), ("ModelFileError", BROKEN))
    for name, fault in faults.items()
]


def load(adapter: Path, fault: str = LOAD, base: Path = BASE, **more: Any) -> Any:
    return run(fault, str(adapter), str(base), str(CASE), warm_up=WARM_UP, **more)


@pytest.mark.parametrize(("error", "break_adapter", "fragments"), ALL)
def test_broken_adapter_is_a_typed_error(
    adapter: Path, error: str, break_adapter: Change, fragments: list[str]
) -> None:
    break_adapter(adapter)
    assert_refused(load(adapter), error, fragments, file_bytes=folder_bytes(adapter))


def test_valid_adapter_loads(adapter: Path) -> None:
    outcome = load(adapter)
    assert outcome.error is None, outcome.message


def test_model_works_after_rejected_adapter(adapter: Path) -> None:
    config_with(use_dora=True)(adapter)
    outcome = load(adapter, GO_ON)
    assert outcome.error is None, outcome.message


@pytest.mark.parametrize(
    ("path", "error", "fragments"),
    [
        ("nowhere", "ModelNotFoundError", ["nowhere", "no directory", "save_pretrained"]),
        (str(BASE), "ModelNotFoundError", [CONFIG, "llama"]),
        (str(CASE / CONFIG), "ModelFileError", ["a file", CONFIG]),
        ("", "ModelNotFoundError", ["''"]),
        ("a\0b", "ModelNotFoundError", ["a\\x00b"]),
    ],
)
def test_invalid_adapter_path(path: str, error: str, fragments: list[str]) -> None:
    outcome = run(f"llm.load_lora_adapter('x', {path!r})", "", str(BASE), str(CASE), warm_up=WARM_UP)
    assert_refused(outcome, error, fragments)


@pytest.mark.parametrize(
    ("model", "module", "message"),
    [
        ("mixtral", "model.layers.0.block_sparse_moe.experts.0.w1", "an expert of a mixture"),
        ("mixtral", "model.layers.0.block_sparse_moe.gate", "the router of a mixture"),
        ("qwen2_moe", "model.layers.0.mlp.experts.1.down_proj", "an expert of a mixture"),
        ("llama", "model.embed_tokens", "an embedding"),
        ("llama_tied", "lm_head", "an lm_head that is tied to the embedding"),
    ],
)
def test_unsupported_target_modules(adapter: Path, model: str, module: str, message: str) -> None:
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(config | {"target_modules": [module], "rank_pattern": {}}))
    sizes = {"lora_A": [8, 64], "lora_B": [64, 8]}
    header = {
        f"base_model.model.{module}.{half}.weight": {
            "dtype": "F32",
            "shape": sizes[half],
            "data_offsets": [at, at + 2048],
        }
        for half, at in (("lora_A", 0), ("lora_B", 2048))
    }
    text = json.dumps(header).encode()
    (adapter / TENSORS).write_bytes(struct.pack("<Q", len(text)) + text + bytes(4096))
    warm_up = """
        from ferrule import LLM
        llm = LLM(arguments[1], threads=1)
    """
    outcome = run(LOAD, str(adapter), str(BASES / model), warm_up=warm_up)
    assert_refused(outcome, "UnsupportedModelError", [TENSORS, module, message], file_bytes=folder_bytes(adapter))


def test_adapter_larger_than_memory_names_required_and_available_bytes(adapter: Path, tmp_path: Path) -> None:
    """The file is sparse and claims four times the memory of the machine."""
    hidden, rank = 256, 65_536
    of_layer = 7 * 2 * hidden * rank * 4
    layers = 4 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // of_layer + 1
    base = tmp_path / "base"
    base.mkdir()
    config = json.loads((BASE / "config.json").read_text())
    config |= {"hidden_size": hidden, "intermediate_size": hidden, "num_hidden_layers": layers}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    (base / "config.json").write_text(json.dumps(config))
    config_with(r=rank, rank_pattern={}, alpha_pattern={})(adapter)
    header: dict[str, Any] = {}
    end = 0
    for layer in range(layers):
        names = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
        for name in names:
            for half, shape in (("lora_A", [rank, hidden]), ("lora_B", [hidden, rank])):
                begin, end = end, end + 4 * rank * hidden
                entry = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
                header[f"base_model.model.model.layers.{layer}.{name}.{half}.weight"] = entry
    text = json.dumps(header).encode()
    (adapter / TENSORS).write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(adapter / TENSORS, 8 + len(text) + end)
    warm_up = """
        from ferrule import LLM
        llm = LLM(arguments[1], threads=1, load_format="dummy")
    """
    outcome = run(LOAD, str(adapter), str(base), warm_up=warm_up, address_space=None)
    assert_refused(outcome, "InsufficientMemoryError", ["the adapter needs", "available"])
    assert "MemoryError" in outcome.bases
