"""Parameters, fields and methods of vLLM: supported, accepted with a warning, or refused with a hint."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import tomllib
import warnings
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import ferrule
from ferrule import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    BeamSearchParams,
    CompatibilityWarning,
    EngineArgs,
    InvalidParameterError,
    SamplingParams,
    UnsupportedTaskError,
)
from ferrule._api import arguments
from ferrule._api.foreign_methods import UNSUPPORTED
from ferrule._params import foreign_engine_args, lora, pooling, sampling
from ferrule._params.compatibility import Ignored, Refused, Rules
from ferrule._params.declaration import parameters
from ferrule._text.chat import options

TABLE: dict[str, dict[str, Any]] = tomllib.loads((Path(__file__).parent / "vllm_api.toml").read_text())
MODEL_ARGUMENTS = {"BeamSearchParams": {"beam_width": 2, "max_tokens": 4}, "LoRARequest": {"lora_name": "a"}}
MESSAGES: Any = [{"role": "user", "content": "Hi"}]
CALLS: dict[str, tuple[Any, ...]] = {
    "LLM.generate": ("Hi",),
    "LLM.chat": (MESSAGES,),
    "LLM.beam_search": ("Hi", BeamSearchParams(beam_width=2, max_tokens=1)),
    "LLM.embed": ("Hi",),
    "LLM.classify": ("Hi",),
    "LLM.score": ("Hi", "Hello"),
    "AsyncLLM.generate": ("Hi",),
    "AsyncLLM.abort": ("0",),
    "AsyncLLM.from_engine_args": (AsyncEngineArgs(),),
}
"""Arguments without which a method cannot be called."""
FIELD_RULES: dict[str, Rules] = {
    "SamplingParams": sampling.FOREIGN,
    "EngineArgs": foreign_engine_args.FOREIGN,
    "PoolingParams": pooling.FOREIGN,
    "LoRARequest": lora.FOREIGN,
}
ARGUMENT_RULES: dict[str, Rules] = {
    "LLM.generate": arguments.FOREIGN,
    "LLM.chat": options.FOREIGN,
    "LLM.beam_search": arguments.FOREIGN,
    "LLM.embed": arguments.FOREIGN_POOLING,
    "LLM.classify": arguments.FOREIGN_POOLING,
    "LLM.score": arguments.FOREIGN_POOLING,
    "AsyncLLM.generate": arguments.FOREIGN,
    "AsyncLLM.abort": arguments.FOREIGN_ABORT,
    "AsyncLLM.from_engine_args": arguments.FOREIGN_START,
}
METHODS = ("LLM", "AsyncLLM")
"""Kinds whose rows are methods; a kind with a dot has the arguments of one."""
OTHER_VALUES: dict[type, Any] = {bool: True, int: 7, float: 0.25, str: "other"}
CHAT_OPTIONS = options.ChatOptions.__annotations__


def is_method(kind: str) -> bool:
    return kind in METHODS


def is_argument(kind: str) -> bool:
    return "." in kind


def is_field(kind: str) -> bool:
    return not is_method(kind) and not is_argument(kind)


def rows(status: str, *has_kind: Callable[[str], bool]) -> list[Any]:
    """Returns the rows of a status and of the kinds that one of the functions accepts."""
    return [
        pytest.param(kind, name, row, id=f"{kind}.{name}")
        for kind, fields in TABLE.items()
        for name, row in fields.items()
        if row["status"] == status and any(accepts(kind) for accepts in has_kind)
    ]


def make(kind: str, **given: Any) -> object:
    """Creates an object with fields, or calls the method of an argument."""
    owner, _, method = kind.partition(".")
    cls = getattr(ferrule, owner)
    if not method:
        return cls(**{**MODEL_ARGUMENTS.get(kind, {}), **given})
    with contextlib.closing(cls(seed=0)) as model:
        result = getattr(model, method)(*CALLS[kind], **given)
        if isinstance(result, (AsyncLLM, Coroutine)):
            result.close()
        return result


def other_value(row: dict[str, Any]) -> Any:
    default = row.get("default")
    return not default if isinstance(default, bool) else OTHER_VALUES[type(default)] if default is not None else "other"


@pytest.mark.parametrize(("kind", "name", "row"), rows("same", is_field))
def test_fields_with_vllm_names_and_defaults(kind: str, name: str, row: dict[str, Any]) -> None:
    cls = getattr(ferrule, kind)
    assert name in {each.name for each in dataclasses.fields(cls)} or hasattr(cls, name)
    if "default" in row:
        assert parameters(cls)[name].default == row["default"]
    if row.get("none"):
        made = make(kind, **{name: None})
        assert not getattr(made, name)


@pytest.mark.parametrize(("kind", "name", "row"), rows("same", is_method))
def test_methods_with_vllm_names(kind: str, name: str, row: dict[str, Any]) -> None:
    assert callable(getattr(getattr(ferrule, kind), name)), row


@pytest.mark.parametrize(("kind", "name", "row"), rows("same", is_argument))
def test_arguments_with_vllm_names_and_positions(kind: str, name: str, row: dict[str, Any]) -> None:
    owner, _, method = kind.partition(".")
    declared = list(inspect.signature(getattr(getattr(ferrule, owner), method)).parameters.values())
    declared = [each for each in declared if each.name != "self"]
    if "position" in row:
        found = declared[row["position"]]
        assert (found.name, found.kind) == (name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if name in CHAT_OPTIONS and kind == "LLM.chat":
        assert declared[-1].kind is inspect.Parameter.VAR_KEYWORD
    else:
        found = next(each for each in declared if each.name == name)
        assert row.get("required") or found.default == row.get("default")


@pytest.mark.parametrize("name", [name for name in TABLE["LLM.chat"] if name in CHAT_OPTIONS])
def test_chat_options_have_vllms_defaults(name: str, llm: LLM) -> None:
    given: Any = {name: TABLE["LLM.chat"][name].get("default")}
    assert llm.apply_chat_template(MESSAGES, **given) == llm.apply_chat_template(MESSAGES)
    assert llm.chat(MESSAGES, SamplingParams(max_tokens=1), **given)[0].prompt == llm.apply_chat_template(MESSAGES)


@pytest.mark.usefixtures("fake_engine")
@pytest.mark.parametrize(("kind", "name", "row"), rows("ignored", is_field, is_argument))
def test_ignored_fields_give_warning(kind: str, name: str, row: dict[str, Any]) -> None:
    with pytest.warns(CompatibilityWarning, match=f"^{name} has no effect: "):
        make(kind, **{name: other_value(row)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(kind, **{name: row.get("default")})


@pytest.mark.usefixtures("fake_engine")
@pytest.mark.parametrize(("kind", "name", "row"), rows("refused", is_field, is_argument))
def test_unsupported_fields_are_rejected_with_hint(kind: str, name: str, row: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError, match=f"^{name} is not supported, got .*; ") as caught:
        make(kind, **{name: other_value(row)})
    assert caught.value.field == name
    # The embedded model has no classifier; the error shows that the argument passed.
    with pytest.raises(UnsupportedTaskError) if kind == "LLM.classify" else contextlib.nullcontext():
        make(kind, **{name: row.get("default")})


@pytest.mark.usefixtures("fake_engine")
@pytest.mark.parametrize("kind", METHODS)
def test_unsupported_methods_name_alternative(kind: str) -> None:
    cls = getattr(ferrule, kind)
    refused = [name for name, row in TABLE[kind].items() if row["status"] == "refused"]
    with contextlib.closing(cls()) as model:
        for owner in (cls, model):
            for name in refused:
                with pytest.raises(AttributeError, match=f"^{kind}.{name} is not supported; ") as caught:
                    getattr(owner, name)
                assert str(caught.value).endswith(UNSUPPORTED[name])
    with pytest.raises(AttributeError, match=f"^type object '{kind}' has no attribute 'other'$"):
        _ = cls.other


@pytest.mark.usefixtures("fake_engine")
@pytest.mark.parametrize("cls", [EngineArgs, LLM, AsyncLLM])
def test_warning_points_to_constructor_call(cls: type[EngineArgs | LLM | AsyncLLM]) -> None:
    ignored: Any = {"swap_space": 8}
    with pytest.warns(CompatibilityWarning) as caught:
        made = cls(**ignored)
    assert [warning.filename for warning in caught] == [__file__]
    if not isinstance(made, EngineArgs):
        made.close()


def test_warning_points_to_method_call(llm: LLM) -> None:
    ignored: Any = {"chat_template_content_format": "string"}
    with pytest.warns(CompatibilityWarning) as caught:
        llm.chat(MESSAGES, **ignored)
    assert [warning.filename for warning in caught] == [__file__]


def test_tokenizer_has_huggingface_methods(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("Paris")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Paris"
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == llm.apply_chat_template(messages)
    assert tokenizer.eos_token_id == llm.info()["eos_token_ids"][0]


def effect(rule: object) -> str:
    """Renders what the warning or the error says."""
    assert isinstance(rule, (Ignored, Refused))
    return f"no effect: {rule.reason}" if isinstance(rule, Ignored) else f"error: {rule.instead}"


def table_of_fields() -> str:
    """Renders the parameters that are not the same."""
    lines = ["| parameter of vLLM | ferrule |", "|---|---|"]
    for kind, rules in FIELD_RULES.items():
        for name, row in TABLE[kind].items():
            assert (row["status"] == "same") == (name not in rules)
            if name in rules:
                lines.append(f"| `{kind}({name}=...)` | {effect(rules[name])} |")
    return "\n".join(lines)


def table_of_methods() -> str:
    """Renders the methods and arguments that are not the same; those with the same effect share a row."""
    names: dict[str, list[str]] = {}
    for kind, fields in TABLE.items():
        rules = ARGUMENT_RULES.get(kind, {})
        for name, row in fields.items():
            if is_argument(kind):
                assert (row["status"] == "same") == (name not in rules)
                if name in rules:
                    names.setdefault(effect(rules[name]), []).append(f"`{kind}({name}=...)`")
            elif is_method(kind) and row["status"] == "refused":
                names.setdefault(f"error: {UNSUPPORTED[name]}", []).append(f"`{kind}.{name}`")
    rendered = [f"| {', '.join(several)} | {text} |" for text, several in names.items()]
    return "\n".join(["| method or argument of vLLM | ferrule |", "|---|---|", *rendered])


@pytest.mark.parametrize("table", [table_of_fields, table_of_methods])
def test_migration_guide_has_generated_tables(table: Callable[[], str]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "migrating.md").read_text()
    assert table() in page


def test_every_vllm_class_has_rules() -> None:
    refused = {kind for kind, fields in TABLE.items() if any(row["status"] != "same" for row in fields.values())}
    assert refused - set(METHODS) == set(FIELD_RULES) | set(ARGUMENT_RULES)
