"""ERNIE 4.5 with experts: how config.json is read, and what is refused."""

from __future__ import annotations

import pytest

from archs.specs import experts, sparse, spec_of
from ferrule import UnsupportedModelError
from ferrule.archs.spec import Dense, Router


def test_ernie4_5_moe_layer_range_and_interval() -> None:
    assert sparse(spec_of("ernie4_5_moe")) == [False, True, True]
    assert sparse(spec_of("ernie4_5_moe", moe_layer_start_index=0, moe_layer_end_index=1)) == [True, True, False]
    skipping = {"moe_layer_start_index": 0, "moe_layer_end_index": -1, "moe_layer_interval": 2}
    assert sparse(spec_of("ernie4_5_moe", **skipping)) == [False, True, False]
    mixture = experts(spec_of("ernie4_5_moe"))[1]
    assert mixture is not None
    assert mixture.router == Router(normalize=True, correction_bias=True)
    assert mixture.shared == Dense(64, "silu")
    last = experts(spec_of("ernie4_5_moe", moe_num_shared_experts=0))[2]
    assert last is not None
    assert last.shared is None
    with pytest.raises(UnsupportedModelError, match=r"moe_norm_min must be at most 1e-06, got 0\.1"):
        spec_of("ernie4_5_moe", moe_norm_min=0.1)
