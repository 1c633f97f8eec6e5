"""Directory of everything that ferrule stores: packed weights, and models from packages."""

from __future__ import annotations

import os
from pathlib import Path

DIRECTORY = "FERRULE_CACHE"
"""Environment variable with the directory; the default is `ferrule` in $XDG_CACHE_HOME or ~/.cache."""


def cache_home() -> Path:
    """Returns the directory, which may not exist."""
    home = os.environ.get("XDG_CACHE_HOME", "") or os.path.expanduser("~/.cache")  # noqa: PTH111  # never raises
    return Path(os.environ.get(DIRECTORY, "") or os.path.join(home, "ferrule")).absolute()  # noqa: PTH118
