"""compressed-tensors in LLM Compressor's configuration."""

from __future__ import annotations

from ferrule._loading.quantized.sizes import bits_among, block, group_size
from ferrule.archs.config import Config
from ferrule.archs.spec import CompressedTensors, CompressedWeights

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")
SPARSE_FORMATS = ("dense", "sparse-bitmask", "sparse-24-bitmask")
"""Formats of `sparsity_config`. The tensors of a weight show whether it is sparse."""
MIXED = "mixed-precision"
"""Value of `format` if the groups have different formats."""
BITS = {"int": (2, 4, 8), "float": (8,)}
STRATEGIES = {"int": ("tensor", "channel", "group"), "float": ("tensor", "channel", "group", "block")}


def compressed_tensors(config: Config) -> CompressedTensors:
    """Reads the weight schemes; the activation formats of the file are ignored.

    Raises ConfigError, UnsupportedModelError.
    """
    _format(config.inner("sparsity_config"), default="dense", known=SPARSE_FORMATS)
    if config.inner("transform_config").inner("config_groups").values:
        raise config.unsupported("transform_config", "missing or empty (rotations are not supported)")
    stored = _format(config, default=FORMATS[0], known=(*FORMATS, MIXED))
    groups = config.inner("config_groups")
    weights: list[CompressedWeights] = []
    for name in groups.values:
        group = groups.inner(name)
        _format(group, default=FORMATS[0] if stored == MIXED else stored, known=FORMATS)
        # Groups that describe only activations or the KV cache have no weights.
        if "weights" in group:
            found = _weights(group.inner("weights"))
            weights += [] if found in weights else [found]
    return CompressedTensors(tuple(weights))


def _format(config: Config, *, default: str, known: tuple[str, ...]) -> str:
    found = config.text("format", default=default)
    if found not in known:
        raise config.unsupported("format", f"one of {', '.join(known)}")
    return found


def _weights(config: Config) -> CompressedWeights:
    kind = "float" if config.text("type", default="int") == "float" else "int"
    config.require(type=kind, dynamic=False)
    bits = bits_among(config, "num_bits", BITS[kind])
    # The default strategy follows from group_size.
    size = group_size(config, "group_size") if "group_size" in config else None
    usual = "group" if size is not None else "channel" if "group_size" in config else "tensor"
    strategy = config.text("strategy", default=usual)
    if strategy not in STRATEGIES[kind]:
        raise config.unsupported("strategy", f"one of {', '.join(STRATEGIES[kind])}")
    if strategy == "group" and size is None:
        raise config.error("group_size", "an integer from 1 with strategy group")
    shape = _block(config) if strategy == "block" else None
    return CompressedWeights(
        kind=kind,
        bits=bits,
        symmetric=config.flag("symmetric", default=True),
        group_size=size if strategy == "group" else None,
        block=shape,
    )


def _block(config: Config) -> tuple[int, int]:
    """Reads the block shape: a list, or text such as `128x128`."""
    value: object = config.values.get("block_structure")
    if isinstance(value, str) and all(part.isdecimal() for part in value.split("x")):
        config = config.with_values(block_structure=[int(part[:16]) for part in value.split("x")])
    found = block(config, "block_structure")
    if found is None:
        raise config.error("block_structure", "a list of two integers with strategy block")
    return found
