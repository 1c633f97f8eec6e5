"""Storage of weights in a checkpoint: the tensor of each role, and its quantization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True)
class Part:
    """Slice of a fused matrix: `rows` of every `stride` rows, from row `first` on."""

    first: int
    rows: int
    stride: int


@dataclass(frozen=True)
class Stack:
    """Slice of a stacked tensor: matrix `index` of `of`."""

    index: int
    of: int


@dataclass(frozen=True)
class Tensor:
    """Checkpoint tensor, or slice of one, that holds a role's weights."""

    names: tuple[str, ...]
    """Name of the tensor, or of several whose rows are concatenated; `2_Dense/linear.weight` is in a subfolder."""
    transposed: bool = False
    """Whether the tensor is stored as [inputs, outputs]."""
    part: Part | None = None
    stack: Stack | None = None
    exponential: Literal["exp", "negated_exp"] | None = None
    """Whether the tensor stores exp(x) or -exp(x) of the values x."""
    alternative: Tensor | None = None
    """Tensor in checkpoints that have none of the first name."""


@dataclass(frozen=True)
class Gptq:
    """GPTQ weights (Frantar et al. 2022) as AutoGPTQ and GPTQModel save them."""

    bits: int
    """Bits of a code: 2, 3, 4 or 8."""
    group_size: int | None
    """Inputs that share a scale; None for a whole row."""
    desc_act: bool = False
    """Whether each input's group is listed (act-order)."""
    zeros_less_one: bool = True
    """Whether zero points are stored minus 1, as in version 1 of the format."""
    method: Literal["gptq"] = "gptq"


@dataclass(frozen=True)
class Awq:
    """AWQ weights of 4 bits as AutoAWQ saves them for its GEMM kernels (Lin et al. 2023)."""

    group_size: int | None
    """Inputs that share a scale; None for a whole row."""
    method: Literal["awq"] = "awq"


@dataclass(frozen=True)
class CompressedWeights:
    """One weight scheme of a compressed-tensors checkpoint."""

    kind: Literal["int", "float"]
    bits: int
    """Bits of a code: 2, 4 or 8; 8 for floating-point codes."""
    symmetric: bool = True
    """Whether zero is the middle code."""
    group_size: int | None = None
    """Inputs that share a scale; None for a scale for each output or for the tensor."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale."""


@dataclass(frozen=True)
class CompressedTensors:
    """Weights as LLM Compressor saves them; the tensors of a weight determine its scheme."""

    weights: tuple[CompressedWeights, ...]
    method: Literal["compressed-tensors"] = "compressed-tensors"


@dataclass(frozen=True)
class Fp8:
    """8-bit floating-point weights with scales."""

    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale; None for a scale for each output or for the tensor."""
    method: Literal["fp8"] = "fp8"


@dataclass(frozen=True)
class BitsAndBytes:
    """bitsandbytes weights: 4-bit codes by table and block, or 8-bit codes by output (Dettmers et al. 2022, 2023)."""

    codes: Literal["nf4", "fp4", "int8"]
    method: Literal["bitsandbytes"] = "bitsandbytes"


@dataclass(frozen=True)
class Mxfp4:
    """MXFP4 weights: 4-bit floating-point codes with a power-of-two scale for each 32 (OCP MX 1.0)."""

    method: Literal["mxfp4"] = "mxfp4"


StoredAs: TypeAlias = Gptq | Awq | CompressedTensors | Fp8 | BitsAndBytes | Mxfp4
