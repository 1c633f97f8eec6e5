"""AWQ (Lin et al. 2023) in AutoAWQ's configuration."""

from ferrule._loading.quantized.sizes import bits_among, group_size
from ferrule.archs.config import Config
from ferrule.archs.spec import Awq


def awq(config: Config) -> Awq:
    """Reads the configuration. Only the GEMM layout is supported, which nearly all checkpoints have.

    Raises ConfigError, UnsupportedModelError.
    """
    config = config.spelled(bits="w_bit", group_size="q_group_size")
    config.require(backend="autoawq")
    if config.text("version", default="gemm").lower() != "gemm":
        raise config.unsupported("version", "gemm")
    bits_among(config, "bits", (4,))
    return Awq(group_size(config, "group_size"))
