"""EXAONE 4: how config.json is read, and what is refused."""

from __future__ import annotations

import pytest

from archs.specs import LEFT_OUT, ropes, spec_of, windows
from ferrule import ConfigError


def test_exaone4_rotates_sliding_layers_only() -> None:
    spec = spec_of("exaone4")
    assert windows(spec) == [16, 16, 16, None]
    assert [rope is not None for rope in ropes(spec)] == [True, True, True, False]
    assert [rope is not None for rope in ropes(spec_of("exaone4_no_window"))] == [True, True]
    assert windows(spec_of("exaone4", layer_types=LEFT_OUT, sliding_window_pattern=2)) == [16, None, 16, None]
    with pytest.raises(ConfigError, match="sliding_window_pattern must be an integer"):
        spec_of("exaone4", layer_types=LEFT_OUT)
    with pytest.raises(ConfigError, match="sliding_window must be an integer"):
        spec_of("exaone4", sliding_window=None)
