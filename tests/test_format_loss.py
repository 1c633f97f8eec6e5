"""Warnings before a format that hurts models of a size: `ferrule info` and `ferrule run`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import fakes
from ferrule import model_info
from ferrule._api.format_loss import HARMFUL, MEASURED, format_warning
from ferrule._cli import main
from ferrule._params.options import QUANTIZATIONS

PAGE = Path(__file__).parents[1] / "docs" / "formats.md"


@pytest.mark.parametrize("model", MEASURED, ids=lambda model: model.name)
def test_harmful_formats_of_measured_models_have_a_warning(model: Any) -> None:
    for quantization, kld in model.kld.items():
        warning = format_warning(model.parameters, quantization)
        assert (warning is not None) == (kld >= HARMFUL)
        if warning is not None:
            assert warning.startswith(f"{quantization} hurts models of this size: its KL divergence from f32 is ")
            assert model.name in warning
            assert "; int8 has " in warning
    assert format_warning(model.parameters, "f32") is None
    assert format_warning(model.parameters, "stored") is None


def test_only_similar_sizes_have_a_warning() -> None:
    smallest, *_, largest = MEASURED
    assert format_warning(smallest.parameters, "int4") is None
    assert format_warning(1, "int4") is None
    assert format_warning(2 * largest.parameters, "int4") is not None
    assert format_warning(2 * largest.parameters + 1, "int4") is None
    assert format_warning(8_000_000_000, "int4") is None


def test_table_has_known_formats_in_order() -> None:
    order = [name for name in QUANTIZATIONS if name != "auto"]
    assert [model.parameters for model in MEASURED] == sorted(model.parameters for model in MEASURED)
    for model in MEASURED:
        assert list(model.kld) == sorted(model.kld, key=order.index)
        assert model.kld.keys() == model.same_top.keys()


def test_documentation_has_the_figures_of_the_table() -> None:
    page = PAGE.read_text()
    for model in MEASURED[1:]:
        for quantization, kld in model.kld.items():
            row = rf"\| {model.name} \| {quantization} \|.*\| {kld:g} \|.*\| {model.same_top[quantization]:.1%} \|"
            assert re.search(row.replace("%", " %"), page), row


@pytest.fixture
def small(fake_engine: object, monkeypatch: pytest.MonkeyPatch) -> int:
    """Gives the fake engine the size of a small model."""
    parameters = MEASURED[1].parameters
    info = fakes.Engine.info
    monkeypatch.setattr(
        fakes.Engine, "info", lambda self: json.dumps({**json.loads(info(self)), "parameters": parameters})
    )
    return parameters


def test_commands_warn_in_one_line(small: int, capsys: pytest.CaptureFixture[str]) -> None:
    warning = format_warning(small, "int4")
    run = ["run", "Once upon", "-n", "2", "--quantization"]
    assert main([*run, "int4"]) == 0
    assert capsys.readouterr().err.splitlines()[0] == f"warning: {warning}"
    assert main([*run, "int4", "--quiet"]) == 0
    assert "warning" not in capsys.readouterr().err
    assert main([*run, "int8"]) == 0
    assert "warning" not in capsys.readouterr().err
    assert main(["info", "--quantization", "int4"]) == 0
    assert "\nwarning     int4 hurts models of this size:" in capsys.readouterr().out
    assert model_info(quantization="int4")["format_warning"] == warning
    assert model_info(quantization="int8")["format_warning"] is None
