"""Descriptions of a checkpoint's quantization in words."""

from __future__ import annotations

from ferrule.archs.spec import Awq, BitsAndBytes, CompressedTensors, CompressedWeights, Fp8, Gptq, Mxfp4, StoredAs


def stored_words(stored_as: StoredAs) -> str:
    """Describes the method: "GPTQ, 4 bits in groups of 128"."""
    match stored_as:
        case Gptq():
            order = ", act-order" if stored_as.desc_act else ""
            return f"GPTQ, {stored_as.bits} bits {_shared(stored_as.group_size, None)}{order}"
        case Awq():
            return f"AWQ, 4 bits {_shared(stored_as.group_size, None)}"
        case CompressedTensors():
            kinds = " and ".join(_kind(weights) for weights in stored_as.weights) or "nothing quantized"
            return f"compressed-tensors, {kinds}"
        case Fp8():
            return f"FP8 {_shared(None, stored_as.block)}"
        case BitsAndBytes():
            return f"bitsandbytes, {stored_as.codes}"
        case Mxfp4():
            return "MXFP4 in groups of 32"


def conversion_words(stored_as: StoredAs | None, quantization: str) -> str | None:
    """Describes the conversion of quantized weights; None if the checkpoint is not quantized."""
    if stored_as is None:
        return None
    if quantization == "stored":
        return "kept as stored if kernels support the format, else dequantized and re-quantized"
    if quantization == "f32":
        return "dequantized"
    return f"dequantized, then {'rounded to' if quantization in ('bf16', 'f16') else 're-quantized as'} {quantization}"


def _kind(weights: CompressedWeights) -> str:
    code = "fp8" if weights.kind == "float" else f"{weights.bits} bits"
    return f"{code} {_shared(weights.group_size, weights.block)}"


def _shared(group_size: int | None, block: tuple[int, int] | None) -> str:
    """Describes the weights that share a scale."""
    if block is not None:
        return f"in blocks of {block[0]} x {block[1]}"
    return "by row" if group_size is None else f"in groups of {group_size}"
