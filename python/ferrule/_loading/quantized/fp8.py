"""FP8 checkpoints with scales by block (DeepSeek, Qwen), by tensor (AutoFP8) or by row (fbgemm)."""

from ferrule._loading.quantized.sizes import block
from ferrule.archs.config import Config
from ferrule.archs.spec import Fp8

FORMATS = ("e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2")


def fp8(config: Config) -> Fp8:
    """Reads the block shape. Activation scales are ignored, since ferrule does not round activations to fp8.

    Raises ConfigError, UnsupportedModelError.
    """
    if config.text("fmt", default=FORMATS[0]) not in FORMATS:
        raise config.unsupported("fmt", f"one of {', '.join(FORMATS)}")
    return Fp8(block(config, "weight_block_size"))
