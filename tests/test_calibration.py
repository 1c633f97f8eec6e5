"""Calibrated quantization: lower loss, calibration of all linear layers, and reproducible results."""

from __future__ import annotations

import json
import re
import shutil
import struct
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import TINY
from ferrule import LLM, InsufficientMemoryError, InvalidParameterError, TokenizerError, _native, quantize
from ferrule._api.calibration import WINDOW, calibration_sequences
from ferrule._cli import main
from ferrule._loading import WEIGHTS, read_model_files
from ferrule._params.options import EngineOptions
from ferrule._text.tokenizer import Tokenizer

pytestmark = pytest.mark.native

GOLDEN = Path(__file__).parent / "golden" / "logits"
FAMILIES = ("llama", "gpt2", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3", "opt")
"""Golden cases with all kinds of attention, experts, latent attention, parallel blocks and learned positions."""
VARIANTS = (
    *("deepseek_v4", "gemma3n", "gemma4_e", "gemma4_moe", "glm_moe_dsa", "kimi_linear", "minimax", "minimax_m3"),
    *("qwen4_exp", "recurrent_gemma", "rwkv", "zamba2"),
)
"""Variants with compressed entries and experts by token id, several residual streams, layers that share keys and
values, per-layer embeddings, experts beside a dense network, indexers whose choices layers share, low-rank projections,
lightning attention, embeddings of n-grams, RG-LRUs, RWKV 4, and layers that share weights."""
STDLIB = Path(sysconfig.get_path("stdlib"))
SCORED = ("textwrap.py", "fractions.py", "reprlib.py", "linecache.py")
"""Files that were excluded from training."""
SEEN = ("argparse.py", "typing.py", "ast.py", "logging/__init__.py", "http/client.py", "subprocess.py")


def stdlib_text(names: tuple[str, ...]) -> str:
    return "\n".join((STDLIB / name).read_text() for name in names)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "seen.txt"
    path.write_text(stdlib_text(SEEN))
    return path


def random_sequences(vocab_size: int, count: int, length: int) -> list[list[int]]:
    random = np.random.default_rng(5)
    return random.integers(3, vocab_size, (count, length)).tolist()


def tensors(path: Path) -> dict[str, bytes]:
    raw = (path / WEIGHTS).read_bytes()
    [length] = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__")
    data = raw[8 + length :]
    return {name: data[slice(*tensor["data_offsets"])] for name, tensor in header.items()}


def log_probabilities(model: Path | None, windows: list[list[int]], **options: object) -> np.ndarray:
    with LLM(model, kv_cache_dtype="f32", **options) as llm:  # type: ignore[arg-type]
        logits = np.concatenate([llm.logits(window)[len(window) // 2 :] for window in windows]).astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def test_calibration_reduces_divergence(text: Path, tmp_path: Path) -> None:
    """Returns the mean divergence on held-out text; benches/quality measures all of it."""
    ids = Tokenizer(TINY).encode(stdlib_text(SCORED), add_special_tokens=False)
    windows = [ids[start : start + 256] for start in range(0, len(ids) - 256, 1024)][:16]
    exact = log_probabilities(None, windows, quantization="f32")

    def divergence(model: Path | None, quantization: str) -> float:
        found = log_probabilities(model, windows, quantization=quantization)
        return float((np.exp(exact) * (exact - found)).sum(axis=-1).mean())

    packed = quantize(None, tmp_path / "packed", format="int4", calibrate=text, calibration_tokens=16_384)
    calibrated, plain = divergence(packed, "int4"), divergence(None, "int4")
    assert calibrated < 0.7 * plain, f"{calibrated} of {plain}"
    with LLM(packed) as llm, LLM(quantization="int4") as other:
        assert llm.info()["weight_bytes"] == other.info()["weight_bytes"]


@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
def test_every_linear_layer_is_calibrated(family: str, tmp_path: Path) -> None:
    model = GOLDEN.parent / "variants" / family if family in VARIANTS else GOLDEN / family
    spec = read_model_files(model).spec
    sequences = random_sequences(spec.vocab_size, 24, 60)
    plain = quantize(model, tmp_path / "plain", format="int4")
    calibrated = quantize(model, tmp_path / "calibrated", format="int4", calibrate=sequences)
    before, after = tensors(plain), tensors(calibrated)
    assert before.keys() == after.keys()
    same = {name.rsplit(".", 2)[0] for name in before if "int" in name and before[name] == after[name]}
    # The per-head matrices of latent attention do not multiply rows of the batch, and an embedding has ids as input.
    tied = spec.lm_head is not None and spec.lm_head.tied
    allowed = {name for name in same if ".kv_b." in name or (name.startswith("embedding") and not tied)}
    allowed |= {name for name in same if ".low_rank." in name}  # additions to layers that share weights
    allowed |= {name for name in same if name.startswith("streams.")}  # outside of the layers
    experts = {name for name in same if ".experts." in name}
    assert len(experts) <= 2, "an expert that no token chose is as without calibration"
    assert not {name for name in same - allowed - experts if name.count(".") >= 2 or name in ("lm_head", "embedding")}

    prompt = random_sequences(spec.vocab_size, 1, 40)[0]
    exact, found, other = (
        np.asarray(llm_logits(path, prompt, quantization))
        for path, quantization in ((model, "f32"), (calibrated, "int4"), (plain, "int4"))
    )
    assert np.isfinite(found).all()
    farthest = np.abs(other - exact).max()
    assert np.abs(found - exact).max() <= 1.5 * farthest


def llm_logits(model: Path, prompt: list[int], quantization: str) -> np.ndarray:
    with LLM(model, threads=1, quantization=quantization) as llm:
        return llm.logits(prompt)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_weights_are_independent_of_thread_count(family: str, quantization: str, tmp_path: Path) -> None:
    model = GOLDEN / family
    sequences = random_sequences(read_model_files(model).spec.vocab_size, 7, 60)
    files = {
        (
            quantize(model, tmp_path / str(threads), format=quantization, calibrate=sequences, threads=threads)
            / WEIGHTS
        ).read_bytes()
        for threads in (1, 2, 5)
    }
    assert len(files) == 1


def test_weights_do_not_depend_on_how_exact_ones_are_stored(tmp_path: Path) -> None:
    """The same values in bf16, in f32, and in both, in different matrices and in parts of one."""
    found = []
    for wide in ("none", "weight", "k_proj", "gate_proj"):
        model = tmp_path / wide
        shutil.copytree(GOLDEN / "llama", model)
        widen_stored(model / "model.safetensors", wide)
        sequences = random_sequences(read_model_files(model).spec.vocab_size, 7, 60)
        found.append(tensors(quantize(model, tmp_path / f"{wide}-int8", format="int8", calibrate=sequences)))
        del found[-1]["checksums"]  # that of the metadata, which name the model
    assert all(each == found[0] for each in found)


def widen_stored(path: Path, wide: str) -> None:
    """Rewrites a safetensors file, with the bf16 tensors whose names contain `wide` in f32."""
    raw = path.read_bytes()
    [length] = struct.unpack_from("<Q", raw)
    header, data, parts = json.loads(raw[8 : 8 + length]), raw[8 + length :], bytearray()
    header.pop("__metadata__", None)
    for name, tensor in header.items():
        begin, end = tensor["data_offsets"]
        part = data[begin:end]
        if wide in name:
            tensor["dtype"] = "F32"
            part = (np.frombuffer(part, np.uint16).astype(np.uint32) << 16).tobytes()
        tensor["data_offsets"] = [len(parts), len(parts) + len(part)]
        parts += part
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + parts)


def test_progress_reaches_total(tmp_path: Path) -> None:
    model = GOLDEN / "mixtral"
    seen: list[tuple[int, int]] = []
    sequences = random_sequences(read_model_files(model).spec.vocab_size, 3, 60)
    quantize(model, tmp_path / "packed", calibrate=sequences, progress=lambda done, total: seen.append((done, total)))
    assert len({total for _, total in seen}) == 1
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    [total] = {total for _, total in seen}
    assert total - 8 <= seen[-1][0] <= total
    assert len({done for done, _ in seen}) > 10


def test_windows_are_prompts_sampled_across_text(text: Path, tmp_path: Path) -> None:
    text = Path(shutil.copy(text, tmp_path))
    text.write_text(text.read_text()[:30_000])
    files = read_model_files(TINY)
    tokenizer = Tokenizer(TINY)
    all_of_it = calibration_sequences(text, files, 10**9)
    first = len(tokenizer.first_ids)
    assert {tuple(window[:first]) for window in all_of_it} == {tuple(tokenizer.first_ids)}
    assert [token for window in all_of_it for token in window[first:]] == tokenizer.encode(
        text.read_text(), add_special_tokens=False
    )
    length = max(map(len, all_of_it))
    assert length == min(WINDOW, files.spec.max_position_embeddings)
    some = calibration_sequences(text, files, 5 * length + 1)
    assert some == [all_of_it[index * len(all_of_it) // 5] for index in range(5)]
    assert calibration_sequences(text, files, 1) == all_of_it[:1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"a text of at least 256 tokens \(it has 0\)"),
        (b"Once upon a time", r"a text of at least 256 tokens \(it has \d+\)"),
        (b"ab\xff" * 9000, r"a UTF-8 file \(byte 2 is not\)"),
        (None, "a readable file"),
    ],
)
def test_invalid_calibration_text(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "text"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(InvalidParameterError, match=f"^calibrate must be {message}.*{path}"):
        quantize(None, tmp_path / "packed", calibrate=path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["text"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calibrate": []}, r"^calibration must be a list of at least one sequence of tokens, got \[\]"),
        ({"calibrate": [[1], []]}, r"^calibration\[1\] must be a list of 1 to 2048 token ids, got \[\]"),
        (
            {"calibrate": [[1] * 100_000]},
            r"^calibration\[0\] must be a list of 1 to 2048 token ids, got a list of 100000 items$",
        ),
        ({"calibrate": [[1]], "calibration_tokens": 0}, "^calibration_tokens must be >= 1, got 0"),
        ({"calibrate": [[1]], "format": "bf16"}, "^format must be int8 or int4 with calibrate"),
    ],
)
def test_invalid_calibration_options(options: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        quantize(None, tmp_path / "packed", **options)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([[1, -1]], r"calibrate\[0\]\[1\] must be an integer from 0 to 4095, got -1"),
        ([[1], [1 << 40]], r"calibrate\[1\]\[0\] must be .* 4095"),
        ([[1.5]], r"calibrate\[0\]\[0\] must be an integer from 0 to 4095, got 1\.5"),
        ([None], r"calibrate\[0\] must be a list of token ids"),
        (["some text"], r"calibrate\[0\] must be a list of token ids"),
    ],
)
def test_invalid_calibration_sequences(sequences: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        quantize(None, tmp_path / "packed", calibrate=sequences)


def test_long_text_is_tokenized_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizing a text takes a hundred times its memory."""
    path = tmp_path / "text"
    path.write_text("".join(f"{number:07} words of a long text\n" for number in range(100_000)))
    read: list[int] = []
    encode_part = Tokenizer.encode_part

    def counting(self: Tokenizer, part: str, *, begins: bool) -> list[int]:
        read.append(len(part))
        return encode_part(self, part, begins=begins)

    monkeypatch.setattr(Tokenizer, "encode_part", counting)
    files = read_model_files(TINY)
    windows = calibration_sequences(path, files, 4096)
    assert [len(window) for window in windows] == [512] * 8
    assert sum(read) <= 16 * 4096
    tokenizer = Tokenizer(TINY)
    numbers = [int(tokenizer.decode(window)[:400].split("\n")[1][:7]) for window in windows]
    assert numbers == sorted(numbers)
    assert numbers[0] < 10
    assert numbers[-1] > 99_000


def test_text_requires_tokenizer(text: Path, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError):
        quantize(GOLDEN / "llama", tmp_path / "packed", calibrate=text)


def test_quantize_command_with_calibration(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", "--calibrate", str(text), "--calibration-tokens", "512", "-o", str(tmp_path / "a")]) == 0
    assert "int4" in capsys.readouterr().err
    short = tmp_path / "short"
    short.write_text("Hello")
    assert main(["quantize", "--calibrate", str(short), "-o", str(tmp_path / "b")]) == 2
    assert "calibrate must be a text of at least 256 tokens" in capsys.readouterr().err
    assert main(["quantize", "--calibrate", str(tmp_path / "none"), "-o", str(tmp_path / "b")]) == 2
    assert not (tmp_path / "b").exists()


def test_hessians_exceeding_memory_are_rejected(tmp_path: Path) -> None:
    spec = json.loads(read_model_files(GOLDEN / "llama").spec.to_json())
    for layer in spec["layers"]:
        layer["blocks"][1]["mixer"]["intermediate_size"] = 1 << 21
    options = EngineOptions(quantization="int4", threads=1).to_json()
    with pytest.raises(InsufficientMemoryError, match=r"calibration.* Hessian") as caught:
        _native.pack(json.dumps(spec), None, options, str(tmp_path / "out"), {}, [[7, 8, 9]])
    [needs, available] = [int(number) for number in re.findall(r"\d{3,}", str(caught.value))]
    assert needs > 4 << 42 > available
