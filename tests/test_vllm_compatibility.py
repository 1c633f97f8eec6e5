"""Parameters and fields of vLLM: supported, accepted with a warning, or refused with a hint."""

from __future__ import annotations

import dataclasses
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest

import ferrule
from ferrule import LLM, CompatibilityWarning, InvalidParameterError
from ferrule._params import foreign_engine_args, lora, pooling, sampling
from ferrule._params.compatibility import Ignored, Refused, Rules
from ferrule._params.declaration import parameters

TABLE: dict[str, dict[str, Any]] = tomllib.loads((Path(__file__).parent / "vllm_api.toml").read_text())
MODEL_ARGUMENTS = {"BeamSearchParams": {"beam_width": 2, "max_tokens": 4}, "LoRARequest": {"lora_name": "a"}}
RULES: dict[str, Rules] = {
    "SamplingParams": sampling.FOREIGN,
    "EngineArgs": foreign_engine_args.FOREIGN,
    "PoolingParams": pooling.FOREIGN,
    "LoRARequest": lora.FOREIGN,
}
OTHER_VALUES: dict[type, Any] = {bool: True, int: 7, float: 0.25, str: "other"}


def rows(status: str) -> list[Any]:
    return [
        pytest.param(kind, name, row, id=f"{kind}.{name}")
        for kind, fields in TABLE.items()
        for name, row in fields.items()
        if row["status"] == status
    ]


def make(kind: str, **given: Any) -> object:
    return getattr(ferrule, kind)(**{**MODEL_ARGUMENTS.get(kind, {}), **given})


def other_value(row: dict[str, Any]) -> Any:
    default = row.get("default")
    return not default if isinstance(default, bool) else OTHER_VALUES[type(default)] if default is not None else "other"


@pytest.mark.parametrize(("kind", "name", "row"), rows("same"))
def test_the_same(kind: str, name: str, row: dict[str, Any]) -> None:
    cls = getattr(ferrule, kind)
    assert name in {each.name for each in dataclasses.fields(cls)} or hasattr(cls, name)
    if "default" in row:
        assert parameters(cls)[name].default == row["default"]
    if row.get("none"):
        made = make(kind, **{name: None})
        assert not getattr(made, name)


@pytest.mark.parametrize(("kind", "name", "row"), rows("ignored"))
def test_accepted_with_a_warning(kind: str, name: str, row: dict[str, Any]) -> None:
    with pytest.warns(CompatibilityWarning, match=f"^{name} has no effect: "):
        make(kind, **{name: other_value(row)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(kind, **{name: row.get("default")})


@pytest.mark.parametrize(("kind", "name", "row"), rows("refused"))
def test_refused_with_a_hint(kind: str, name: str, row: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError, match=f"^{name} must be left out; ") as caught:
        make(kind, **{name: other_value(row)})
    assert caught.value.field == name
    make(kind, **{name: row.get("default")})


def test_methods_that_are_not_supported_say_what_to_use(llm: LLM) -> None:
    for method in ("encode", "sleep", "wake_up", "collective_rpc", "apply_model", "get_metrics", "reset_prefix_cache"):
        with pytest.raises(AttributeError, match=f"LLM.{method} is not supported; "):
            getattr(llm, method)


def test_the_tokenizer_has_hugging_faces_methods(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("Paris")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Paris"
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == llm.apply_chat_template(messages)
    assert tokenizer.eos_token_id == llm.info()["eos_token_ids"][0]


def migration_table() -> str:
    """Renders the parameters that are not the same, with what the warning or the error says."""
    lines = ["| parameter of vLLM | ferrule |", "|---|---|"]
    for kind, rules in RULES.items():
        for name, row in TABLE[kind].items():
            rule = rules.get(name)
            if isinstance(rule, Ignored):
                lines.append(f"| `{kind}({name}=...)` | no effect: {rule.reason} |")
            elif isinstance(rule, Refused):
                lines.append(f"| `{kind}({name}=...)` | error: {rule.instead} |")
            assert (row["status"] == "same") == (rule is None)
    return "\n".join(lines)


def test_the_migration_guide_has_the_table() -> None:
    page = (Path(__file__).parents[1] / "docs" / "migrating.md").read_text()
    assert migration_table() in page
