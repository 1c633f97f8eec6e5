"""MXFP4 (OCP MX 1.0) in gpt-oss's configuration."""

from ferrule.archs.config import Config
from ferrule.archs.spec import Mxfp4


def mxfp4(config: Config) -> Mxfp4:
    """Returns the only supported layout."""
    del config
    return Mxfp4()
