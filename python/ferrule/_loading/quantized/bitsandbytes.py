"""bitsandbytes (Dettmers et al. 2022, 2023)."""

from typing import Literal

from ferrule.archs.config import Config
from ferrule.archs.spec import BitsAndBytes

TYPES: dict[str, Literal["nf4", "fp4"]] = {"nf4": "nf4", "fp4": "fp4"}


def bitsandbytes(config: Config) -> BitsAndBytes:
    """Reads the type of the codes; the tensors show whether the scales are quantized too.

    Raises ConfigError, UnsupportedModelError.
    """
    four, eight = (config.flag(f"load_in_{bits}bit", default=False) for bits in (4, 8))
    if four == eight:
        raise config.error("load_in_4bit", "true if load_in_8bit is false, and false if it is true")
    if eight:
        return BitsAndBytes("int8")
    found = config.text("bnb_4bit_quant_type", default="fp4")
    if found not in TYPES:
        raise config.unsupported("bnb_4bit_quant_type", f"one of {', '.join(TYPES)}")
    return BitsAndBytes(TYPES[found])
