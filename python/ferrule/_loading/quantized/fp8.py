"""Floating-point numbers of 8 bits with scales: DeepSeek's and Qwen's blocks, AutoFP8's tensors, fbgemm's rows."""

from ferrule._loading.quantized.sizes import block
from ferrule.archs.config import Config
from ferrule.archs.spec import Fp8

FORMATS = ("e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2")


def fp8(config: Config) -> Fp8:
    """Scales of activations (`activation_scheme`, `input_scale`) are not looked at: activations are not rounded to fp8.

    Raises ConfigError, UnsupportedModelError.
    """
    if config.text("fmt", default=FORMATS[0]) not in FORMATS:
        raise config.unsupported("fmt", f"one of {', '.join(FORMATS)}")
    return Fp8(block(config, "weight_block_size"))
