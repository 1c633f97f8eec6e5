"""docs/sampling.md names every parameter with its default and range, and lists the stages in order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ferrule._params.declaration import Integer, Number, parameters
from ferrule._params.sampling import STANDARD, SamplingParams

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "sampling.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ")]
NOT_OF_STAGES = {
    *(
        "n",
        "best_of",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "logprobs",
        "prompt_logprobs",
        "entropy",
        "prediction",
    ),
    *("skip_special_tokens", "include_stop_str_in_output", "detokenize", "output_kind"),
}


def test_table_has_every_stage_parameter() -> None:
    table = "\n".join(ROWS)
    missing = [name for name in SamplingParams.__dataclass_fields__ if f"`{name}`" not in table]
    assert set(missing) == NOT_OF_STAGES


NUMBERS = [
    name
    for name, each in parameters(SamplingParams).items()
    if isinstance(each.bounds, Number | Integer) and name not in {*STANDARD, *NOT_OF_STAGES, "min_tokens"}
]


@pytest.mark.parametrize("name", NUMBERS)
def test_documented_defaults_and_limits(name: str) -> None:
    row = next(row for row in ROWS if f"`{name}`" in row)
    found = re.search(rf"`{name}`[^(]*\(([^)]*)\)", row)
    assert found is not None
    limits = found.group(1)
    parameter = parameters(SamplingParams)[name]
    default: Any = parameter.default
    assert isinstance(parameter.bounds, Number | Integer)
    assert limits.startswith(f"{default:g}")
    high = parameter.bounds.high
    assert high == default or f"{high}" in limits or high == 2**31 - 1


def test_stages_are_listed_in_execution_order() -> None:
    source = (ROOT / "rust" / "engine" / "src" / "sampling" / "mod.rs").read_text()
    modules = re.findall(r"^    &(\w+)::\w+,$", source, re.MULTILINE)
    files = {path.stem for path in (ROOT / "rust" / "engine" / "src" / "sampling").glob("*.rs")}
    assert set(modules) < files
    titles = [row.split("|")[1].strip() for row in ROWS if not row.startswith("| stage")]
    places = [titles.index(TITLES[module]) for module in modules]
    assert places == sorted(places)


TITLES = {
    "structured_outputs": "structure",
    "allowed_token_ids": "allowed tokens",
    "bad_words": "bad words",
    "no_repeat_ngram": "n-grams",
    "logit_bias": "bias",
    "min_tokens": "minimum",
    "logits_processors": "logits processors",
    "penalties": "repetition",
    "dry": "DRY",
    "greedy": "greedy",
    "top_n_sigma": "top-n-sigma",
    "temperature": "temperature",
    "dynamic_temperature": "dynamic temperature",
    "min_p": "min-p",
    "top_k": "top-k",
    "top_p": "top-p",
    "typical_p": "typical",
    "epsilon_cutoff": "epsilon",
    "eta_cutoff": "eta",
    "top_h": "top-h",
    "xtc": "XTC",
    "mirostat": "mirostat",
}
"""Row in the table of each stage's module."""


@pytest.mark.native
def test_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    exec(compile(example, "docs/sampling.md", "exec"), {})
    text = capsys.readouterr().out
    assert len(text) > 10
    assert "e" not in text


def test_generation_config_fields_are_listed() -> None:
    sentence = PAGE.split("default to the values in generation_config.json:")[1].split(".\n")[0]
    assert set(re.findall(r"`(\w+)`", sentence)) == set(STANDARD)
