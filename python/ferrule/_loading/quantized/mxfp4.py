"""MXFP4 (OCP MX 1.0), as OpenAI describes it for gpt-oss."""

from ferrule.archs.config import Config
from ferrule.archs.spec import Mxfp4


def mxfp4(config: Config) -> Mxfp4:
    """There is but one layout, and nothing to choose."""
    del config
    return Mxfp4()
