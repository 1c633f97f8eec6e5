"""GPTQ (Frantar et al. 2022) in AutoGPTQ's and GPTQModel's configuration."""

from ferrule._loading.quantized.sizes import bits_among, group_size
from ferrule.archs.config import Config
from ferrule.archs.spec import Gptq

BITS = (2, 3, 4, 8)
FORMATS = ("gptq", "gptq_v2")
"""Values of `checkpoint_format`: files store zero points minus 1 (v1), or unchanged (v2)."""


def gptq(config: Config) -> Gptq:
    """Reads the layout. `sym` is ignored, since symmetric codes are stored with zero points too.

    Raises ConfigError, UnsupportedModelError.
    """
    config.require(is_marlin_format=False, pack_dtype="int32")
    stored = config.text("checkpoint_format", default=FORMATS[0])
    if stored not in FORMATS:
        raise config.unsupported("checkpoint_format", f"one of {', '.join(FORMATS)}")
    # Rules may only exclude modules ("-:..."), whose tensors are then plain. Rules with other bits are unsupported.
    rules = config.inner("dynamic")
    for rule in rules.values:
        if not rule.startswith("-:"):
            raise rules.unsupported(rule, "a rule that excludes modules (its name begins with -:)")
    return Gptq(
        bits=bits_among(config, "bits", BITS),
        group_size=group_size(config, "group_size"),
        desc_act=config.flag("desc_act", default=False),
        zeros_less_one=stored == FORMATS[0],
    )
