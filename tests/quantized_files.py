"""Quantized checkpoints for tests: a golden model whose linear layers have random codes, packed in NumPy.

Each is written twice: in the format of a quantization method, and with the dequantized values.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lora_files import linear_modules

BASES = Path(__file__).parent / "golden" / "logits"
WEIGHTS = "model.safetensors"

Floats: TypeAlias = npt.NDArray[np.float32]
Stored: TypeAlias = tuple[str, tuple[int, ...], bytes]
"""A tensor: its dtype in safetensors notation, its shape, and its bytes."""
Pack: TypeAlias = Callable[[np.random.Generator, str, int, int], tuple[dict[str, Stored], Floats]]
"""Maps a module's name, outputs and inputs to its stored tensors and its weights `[outputs, inputs]`."""

NF4 = np.linspace(-1, 1, 16, dtype=np.float32) ** 3
"""Code values close to quantiles of the normal distribution; readers must use the stored table."""
FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32) / np.float32(12)
MXFP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""Order of AWQ's eight outputs in a word, lowest bits first."""


def read(folder: Path) -> dict[str, Stored]:
    """Reads the tensors of the only safetensors file in a directory."""
    raw = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header: dict[str, Any] = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    data = raw[8 + length :]
    return {
        name: (entry["dtype"], tuple(entry["shape"]), data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def write(folder: Path, tensors: Mapping[str, Stored]) -> None:
    """Writes the only safetensors file of a directory."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(raw)]}
        end += len(raw)
    text = json.dumps(header).encode()
    raw = b"".join(tensor[2] for tensor in tensors.values())
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + raw)


def make(folder: Path, case: str, quantization: dict[str, Any] | None, pack: Pack, seed: int = 0) -> tuple[Path, Path]:
    """Writes a golden model with packed linear layers and its dequantized copy; returns both directories."""
    base, random = BASES / case, np.random.default_rng(seed)
    config = json.loads((base / "config.json").read_text())
    modules = linear_modules(base)
    packed: dict[str, Stored] = {}
    plain: dict[str, Stored] = {}
    for name, tensor in read(base).items():
        module, _, parameter = name.rpartition(".")
        if parameter != "weight" or module not in modules or module == "lm_head":
            packed[name] = plain[name] = tensor
            continue
        transposed = modules[module].transposed
        outputs, inputs = tensor[1][::-1] if transposed else tensor[1]
        parts, weights = pack(random, module, outputs, inputs)
        packed |= parts
        plain[name] = stored(weights.T if transposed else weights)
    return (
        _folder(folder / "packed", config | {"quantization_config": quantization}, packed),
        _folder(folder / "plain", config, plain),
    )


def make_mxfp4(folder: Path) -> tuple[Path, Path]:
    """Writes gpt-oss with MXFP4 experts and its dequantized copy; returns both directories."""
    base, random = BASES / "gpt_oss", np.random.default_rng(0)
    config = json.loads((base / "config.json").read_text())
    packed: dict[str, Stored] = {}
    plain: dict[str, Stored] = {}
    for name, tensor in read(base).items():
        packed[name] = plain[name] = tensor
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        del packed[name]
        experts, inputs, outputs = tensor[1]
        codes = random.integers(0, 16, (experts, outputs, inputs), np.uint8)
        scales = random.integers(121, 124, (experts, outputs, inputs // 32), np.uint8)
        halves = codes[..., ::2] | codes[..., 1::2] << 4
        packed[f"{name}_blocks"] = stored(halves.reshape(experts, outputs, inputs // 32, 16))
        packed[f"{name}_scales"] = stored(scales)
        weights = MXFP4[codes] * np.exp2(np.repeat(scales, 32, -1).astype(np.float32) - 127)
        plain[name] = stored(weights.transpose(0, 2, 1))
    return (
        _folder(folder / "packed", config | {"quantization_config": {"quant_method": "mxfp4"}}, packed),
        _folder(folder / "plain", config, plain),
    )


def _folder(folder: Path, config: dict[str, Any], tensors: dict[str, Stored]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    write(folder, tensors)
    return folder


def stored(values: npt.NDArray[Any], dtype: str | None = None) -> Stored:
    """Converts a NumPy array to a tensor with its safetensors dtype."""
    kind = {"f": "F", "i": "I", "u": "U"}[values.dtype.kind]
    return dtype or f"{kind}{8 * values.dtype.itemsize}", values.shape, np.ascontiguousarray(values).tobytes()


def words(codes: npt.NDArray[np.integer[Any]], bits: int) -> npt.NDArray[np.int32]:
    """Packs codes into words as bit streams along the last axis, lowest bits first."""
    digits = (codes[..., None].astype(np.uint64) >> np.arange(bits, dtype=np.uint64) & 1).astype(np.uint8)
    line = digits.reshape(*codes.shape[:-1], -1)
    line = np.pad(line, [(0, 0)] * (line.ndim - 1) + [(0, -line.shape[-1] % 32)])
    return np.packbits(line, axis=-1, bitorder="little").view(np.int32)


def scales_of(random: np.random.Generator, *shape: int) -> npt.NDArray[np.float16]:
    """Random scales that keep 4-bit weights below 0.2."""
    return random.uniform(0.002, 0.01, shape).astype(np.float16)


def gptq(bits: int, group_size: int, *, order: bool = False, version: int = 1) -> Pack:
    """Stores a module in the layout of AutoGPTQ and GPTQModel."""

    def pack(random: np.random.Generator, module: str, outputs: int, inputs: int) -> tuple[dict[str, Stored], Floats]:
        size = inputs if group_size == -1 else group_size
        groups = -(-inputs // size)
        codes = random.integers(0, 1 << bits, (inputs, outputs))
        zeros = random.integers(1, (1 << bits) - 1, (groups, outputs))
        scales = scales_of(random, groups, outputs) / np.float16(1 << max(bits - 4, 0))
        group_of = np.arange(inputs, dtype=np.int32) // size
        if order:
            random.shuffle(group_of)
        parts = {
            f"{module}.qweight": stored(words(codes.T, bits).T),
            f"{module}.qzeros": stored(words(zeros - (version == 1), bits)),
            f"{module}.scales": stored(scales),
            f"{module}.g_idx": stored(group_of),
        }
        weights = scales.astype(np.float32)[group_of] * (codes - zeros[group_of]).astype(np.float32)
        return parts, weights.T

    return pack


def awq(group_size: int) -> Pack:
    """Stores a module in AutoAWQ's layout."""

    def pack(random: np.random.Generator, module: str, outputs: int, inputs: int) -> tuple[dict[str, Stored], Floats]:
        size = inputs if group_size == -1 else group_size
        groups = -(-inputs // size)
        codes, zeros = (random.integers(0, 16, (rows, outputs)) for rows in (inputs, groups))
        scales = scales_of(random, groups, outputs)
        parts = {
            f"{module}.qweight": stored(words(codes.reshape(inputs, -1, 8)[..., AWQ_ORDER].reshape(inputs, -1), 4)),
            f"{module}.qzeros": stored(words(zeros.reshape(groups, -1, 8)[..., AWQ_ORDER].reshape(groups, -1), 4)),
            f"{module}.scales": stored(scales),
        }
        group_of = np.arange(inputs) // size
        return parts, (scales.astype(np.float32)[group_of] * (codes - zeros[group_of]).astype(np.float32)).T

    return pack


def compressed_words(bits: int, group_size: int | None, *, symmetric: bool = True, order: bool = False) -> Pack:
    """Stores a module in the pack-quantized format of compressed-tensors."""

    def pack(random: np.random.Generator, module: str, outputs: int, inputs: int) -> tuple[dict[str, Stored], Floats]:
        size = group_size or inputs
        groups = -(-inputs // size)
        half = 1 << (bits - 1)
        codes = random.integers(-half, half, (outputs, inputs))
        zeros = np.zeros((outputs, groups), np.int64) if symmetric else random.integers(-half, half, (outputs, groups))
        scales = scales_of(random, outputs, groups) / np.float16(1 << (bits - 4))
        group_of = np.arange(inputs, dtype=np.int32) // size
        if order:
            random.shuffle(group_of)
        parts = {
            f"{module}.weight_packed": stored(words(codes + half, bits)),
            f"{module}.weight_shape": stored(np.array([outputs, inputs])),
            f"{module}.weight_scale": stored(scales),
        }
        if not symmetric:
            parts[f"{module}.weight_zero_point"] = stored(words((zeros + half).T, bits).T)
        if order:
            parts[f"{module}.weight_g_idx"] = stored(group_of)
        return parts, scales.astype(np.float32)[:, group_of] * (codes - zeros[:, group_of]).astype(np.float32)

    return pack


def int8(*, symmetric: bool = True, whole: bool = False) -> Pack:
    """Stores a module in the int-quantized format of compressed-tensors, with a scale per output or per tensor."""

    def pack(random: np.random.Generator, module: str, outputs: int, inputs: int) -> tuple[dict[str, Stored], Floats]:
        codes = random.integers(-128, 128, (outputs, inputs)).astype(np.int8)
        scales = scales_of(random, 1 if whole else outputs) / np.float16(16)
        zeros = random.integers(-9, 9, scales.shape).astype(np.int8) * (not symmetric)
        shape = (1,) if whole else (outputs, 1)
        parts = {f"{module}.weight": stored(codes), f"{module}.weight_scale": stored(scales.reshape(shape))}
        if not symmetric:
            parts[f"{module}.weight_zero_point"] = stored(zeros.astype(np.int8).reshape(shape))
        numbers = codes.astype(np.float32) - zeros.astype(np.float32)[:, None]
        return parts, np.multiply(scales.astype(np.float32)[:, None], numbers, dtype=np.float32)

    return pack


def floats(random: np.random.Generator, module: str, outputs: int, inputs: int) -> tuple[dict[str, Stored], Floats]:
    """Stores a module in f32."""
    weights = random.normal(0, 0.2, (outputs, inputs)).astype(np.float32)
    return {f"{module}.weight": stored(weights)}, weights


def sparse(dense: Pack, *, two_of_four: bool) -> Pack:
    """Stores some weights or codes of another format in the sparse formats of compressed-tensors."""

    def pack(random: np.random.Generator, module: str, outputs: int, inputs: int) -> tuple[dict[str, Stored], Floats]:
        parts, weights = dense(random, module, outputs, inputs)
        kind, _, raw = parts.pop(f"{module}.weight")
        if two_of_four:
            order = random.permuted(np.tile([True, True, False, False], (outputs * inputs // 4, 1)), axis=1)
            mask = order.reshape(outputs, inputs)
        else:
            mask = random.random((outputs, inputs)) < 0.4
        values = np.frombuffer(raw, np.uint8).reshape(outputs, inputs, -1)[mask]
        count = mask.sum(1)
        parts |= {
            f"{module}.compressed": (kind, (outputs, inputs // 2) if two_of_four else (len(values),), values.tobytes()),
            f"{module}.bitmask": stored(np.packbits(mask, axis=-1, bitorder="little")),
            f"{module}.shape": stored(np.array([outputs, inputs])),
        }
        if not two_of_four:
            parts[f"{module}.row_offsets"] = stored(np.cumsum(count) - count)
        return parts, np.where(mask, weights, np.float32(0))

    return pack


def fp8(
    block: tuple[int, int] | None, *, whole: bool = False, name: str = "weight_scale_inv", mantissa: int = 3
) -> Pack:
    """Stores a module in 8-bit floating point with a scale per block, per output, or per tensor."""

    def pack(random: np.random.Generator, module: str, outputs: int, inputs: int) -> tuple[dict[str, Stored], Floats]:
        codes = random.integers(0, 256, (outputs, inputs)).astype(np.uint8)
        codes[codes & 0x7F >= 0x70] ^= 0x40  # smaller numbers, and no NaN
        exponent, bias = (codes & 0x7F).astype(np.int64) >> mantissa, (1 << (6 - mantissa)) - 1
        part = (codes & ((1 << mantissa) - 1)).astype(np.float32) / np.float32(1 << mantissa)
        numbers = (part + (exponent > 0)) * np.exp2((np.maximum(exponent, 1) - bias).astype(np.float32))
        numbers = np.where(codes >= 128, -numbers, numbers).astype(np.float32)
        rows, columns = block or ((outputs, inputs) if whole else (1, inputs))
        scales = random.uniform(1e-4, 1e-3, (-(-outputs // rows), -(-inputs // columns))).astype(np.float32)
        scales *= np.float32(32 / np.abs(numbers).max())
        kind = {3: "F8_E4M3", 2: "F8_E5M2"}[mantissa]
        parts = {
            f"{module}.weight": stored(codes, kind),
            f"{module}.{name}": stored(scales.reshape(()) if whole else scales),
        }
        wide = np.repeat(np.repeat(scales, rows, 0)[:outputs], columns, 1)[:, :inputs]
        return parts, numbers * wide

    return pack


def four_bits(codes_are: str, *, nested: bool) -> Pack:
    """Stores a module in the NF4 or FP4 format of bitsandbytes."""

    def pack(random: np.random.Generator, module: str, outputs: int, inputs: int) -> tuple[dict[str, Stored], Floats]:
        codes = random.integers(0, 16, outputs * inputs).astype(np.uint8)
        table = NF4 if codes_are == "nf4" else FP4
        blocks = -(-codes.size // 64)
        state: dict[str, Any] = {
            "quant_type": codes_are,
            "blocksize": 64,
            "dtype": "bfloat16",
            "shape": [outputs, inputs],
        }
        name = f"{module}.weight"
        parts = {
            name: stored((codes[::2] << 4 | codes[1::2])[:, None]),
            f"{name}.quant_map": stored(table),
        }
        if nested:
            inner, nested_map = (
                random.integers(0, 256, blocks).astype(np.uint8),
                np.linspace(-1, 1, 256, dtype=np.float32),
            )
            outer = random.uniform(0.01, 0.02, -(-blocks // 256)).astype(np.float32)
            offset = np.float32(0.0625)
            scales = nested_map[inner] * np.repeat(outer, 256)[:blocks] + offset
            parts[f"{name}.absmax"] = stored(inner)
            parts[f"{name}.nested_absmax"] = stored(outer)
            parts[f"{name}.nested_quant_map"] = stored(nested_map)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
        else:
            scales = random.uniform(0.05, 0.2, blocks).astype(np.float32)
            parts[f"{name}.absmax"] = stored(scales)
        text = np.frombuffer(json.dumps(state).encode(), np.uint8)
        parts[f"{name}.quant_state.bitsandbytes__{codes_are}"] = stored(text)
        weights = table[codes] * np.repeat(scales, 64)[: codes.size]
        return parts, weights.reshape(outputs, inputs)

    return pack


def eight_bits(random: np.random.Generator, module: str, outputs: int, inputs: int) -> tuple[dict[str, Stored], Floats]:
    """Stores a module in the LLM.int8() format of bitsandbytes."""
    codes = random.integers(-127, 128, (outputs, inputs)).astype(np.int8)
    scales = random.uniform(0.05, 0.2, outputs).astype(np.float32)
    parts = {
        f"{module}.weight": stored(codes),
        f"{module}.SCB": stored(scales),
        f"{module}.weight_format": ("U8", (), b"\0"),
    }
    factors = np.multiply(scales, np.float32(1) / np.float32(127), dtype=np.float32)
    return parts, np.multiply(codes, factors[:, None], dtype=np.float32)
