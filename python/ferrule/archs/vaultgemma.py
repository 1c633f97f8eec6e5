"""VaultGemma (Sinha et al. 2025): Gemma 2 without the norms after its blocks."""

from ferrule.archs.config import Config
from ferrule.archs.gemma2 import gemma2
from ferrule.archs.spec import ModelSpec


def vaultgemma(config: Config) -> ModelSpec:
    """Missing fields have Gemma 2's defaults."""
    return gemma2(config, norms="before")
