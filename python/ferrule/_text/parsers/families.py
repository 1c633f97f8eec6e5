"""Table of all parsers, one line each, under vLLM's names where vLLM has the parser.

The parser of a model is detected by markers in its chat template.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ferrule._text.parsers import (
    apertus,
    apriel,
    cohere,
    deepseek,
    dsml,
    functionary,
    gemma4,
    glm,
    harmony,
    hermes,
    kimi,
    lfm2,
    minimax,
    mistral,
    nemotron,
    olmo,
    qwen3_coder,
    solar,
)
from ferrule._text.parsers.gemma3 import gemma3
from ferrule._text.parsers.llama import JSON_FORM, TAG_END, TAGS, llama_json, llama_pythonic
from ferrule._text.parsers.reader import Read
from ferrule._text.parsers.state import State, Thought
from ferrule.errors import InvalidParameterError


@dataclass(frozen=True)
class Family:
    """Parser of a family of models; base class with the fields that all parsers have."""

    names: tuple[str, ...]
    """Names of the parser; detection returns the first."""
    marks: tuple[str, ...]
    """Markers in a chat template that identify the family."""
    keep: frozenset[str]
    """Special tokens that the parser needs in the text."""
    model_types: tuple[str, ...] = ()
    """`model_type` of models in the family that may lack a chat template."""
    unless: tuple[str, ...] = ()
    """Markers that rule out the family if the chat template has them."""


@dataclass(frozen=True, kw_only=True)
class ToolCallFamily(Family):
    """Parser of the tool calls of a family of models."""

    read: Callable[[State], Read[None]]
    call_id: tuple[str, int] = ("call_", 24)
    """Prefix of call ids, and the number of letters and digits after it."""
    begin: str = ""
    """Marker with which calls begin; empty if no marker occurs only before calls."""
    json_end: str = ""
    """Marker at the end of a call, if calls are JSON objects with `name` and `arguments`; empty for other formats."""
    dropped: tuple[str, ...] = ()
    """Markers around the answer, which are removed."""


@dataclass(frozen=True, kw_only=True)
class ReasoningFamily(Family):
    """Parser of the reasoning of a family of models, which is between markers."""

    thought: Thought


THINK = Thought("<think>", "</think>", anywhere=False)


def _reasoning(
    names: tuple[str, ...], thought: Thought, *marks: str, model_types: tuple[str, ...] = ()
) -> ReasoningFamily:
    return ReasoningFamily(names, marks, thought.keep, model_types, thought=thought)


HARMONY = ToolCallFamily(("openai",), ("<|channel|>",), harmony.KEEP, ("gpt_oss",), read=harmony.harmony)

# The first match is used, so families whose markers occur in templates of other families come last.
TOOL_CALL_PARSERS = (
    HARMONY,
    ToolCallFamily(
        ("deepseek_v3", "deepseek_v31"),
        (deepseek.CALLS_BEGIN,),
        frozenset({*deepseek.INSIDE, deepseek.SEPARATOR}),
        ("deepseek_v3",),
        begin=deepseek.CALLS_BEGIN,
        read=deepseek.deepseek,
    ),
    ToolCallFamily(
        ("deepseek_v4",),
        (dsml.TAGS.begin, "dsml_token + 'tool_calls>"),
        frozenset({dsml.MARK}),
        ("deepseek_v4",),
        begin=dsml.TAGS.begin,
        read=dsml.dsml,
    ),
    ToolCallFamily(
        ("gemma4",), (gemma4.GEMMA4.begin,), gemma4.GEMMA4.keep, begin=gemma4.GEMMA4.begin, read=gemma4.gemma4
    ),
    ToolCallFamily(
        ("functiongemma",),
        (gemma4.FUNCTIONGEMMA.begin,),
        gemma4.FUNCTIONGEMMA.keep,
        begin=gemma4.FUNCTIONGEMMA.begin,
        read=gemma4.functiongemma,
    ),
    ToolCallFamily(
        ("mistral",),
        (mistral.CALLS,),
        frozenset({mistral.CALLS, mistral.CALL_ID, mistral.ARGS}),
        begin=mistral.CALLS,
        read=mistral.mistral,
        call_id=("", mistral.ID_LENGTH),
    ),
    ToolCallFamily(
        ("seed_oss",),
        (qwen3_coder.SEED_TAGS.begin,),
        frozenset({qwen3_coder.SEED_TAGS.begin, qwen3_coder.SEED_TAGS.end}),
        begin=qwen3_coder.SEED_TAGS.begin,
        read=qwen3_coder.seed_oss,
    ),
    ToolCallFamily(
        ("functionary",),
        (functionary.BEGIN,),
        frozenset(),
        unless=("<tool_call>",),
        begin=functionary.BEGIN,
        read=functionary.functionary,
    ),
    ToolCallFamily(
        ("qwen3_coder", "qwen3_xml"),
        (qwen3_coder.QWEN_TAGS.call,),
        frozenset({qwen3_coder.QWEN_TAGS.begin, qwen3_coder.QWEN_TAGS.end}),
        begin=qwen3_coder.QWEN_TAGS.begin,
        read=qwen3_coder.qwen3_coder,
    ),
    ToolCallFamily(
        ("jamba", "apriel"),
        (apriel.BEGIN + "[",),
        frozenset({apriel.BEGIN, apriel.END}),
        begin=apriel.BEGIN,
        read=apriel.apriel,
    ),
    ToolCallFamily(
        ("cohere_command3", "cohere_command4"),
        (cohere.BEGIN,),
        frozenset({cohere.BEGIN, cohere.END}),
        begin=cohere.BEGIN,
        read=cohere.cohere,
    ),
    ToolCallFamily(
        ("solar_open",),
        (solar.BEGIN,),
        frozenset({solar.BEGIN, solar.NAME, solar.ARGS, solar.END, *solar.AROUND}),
        begin=solar.BEGIN,
        read=solar.solar,
        call_id=("", 10),
    ),
    ToolCallFamily(
        ("minimax_m3",),
        (minimax.TAG,),
        frozenset({minimax.TAG, "<tool_call>", "</tool_call>"}),
        begin=minimax.TAGS.begin,
        read=minimax.minimax_m3,
    ),
    ToolCallFamily(
        ("minimax_m2",),
        (minimax.M2_TAGS.begin,),
        frozenset({minimax.M2_TAGS.begin, minimax.M2_TAGS.end}),
        begin=minimax.M2_TAGS.begin,
        read=minimax.minimax_m2,
    ),
    ToolCallFamily(
        ("minimax", "minimax_m1"),
        (minimax.M1_BEGIN + minimax.M1_END,),
        frozenset({minimax.M1_BEGIN, minimax.M1_END}),
        begin=minimax.M1_BEGIN,
        json_end=minimax.M1_END,
        read=minimax.minimax_m1,
    ),
    ToolCallFamily(
        ("kimi_k2",),
        (kimi.SECTION,),
        frozenset(kimi.TOKENS),
        begin=kimi.SECTION,
        read=kimi.kimi,
    ),
    ToolCallFamily(
        ("lfm2",), (lfm2.BEGIN, *lfm2.LISTED), frozenset({lfm2.BEGIN, lfm2.END}), begin=lfm2.BEGIN, read=lfm2.lfm2
    ),
    ToolCallFamily(
        ("apertus",),
        (apertus.BEGIN,),
        frozenset({apertus.BEGIN, apertus.END}),
        begin=apertus.BEGIN,
        read=apertus.apertus,
    ),
    ToolCallFamily(
        ("nemotron_json",),
        (nemotron.BEGIN,),
        frozenset({nemotron.BEGIN, nemotron.END}),
        begin=nemotron.BEGIN,
        read=nemotron.nemotron,
    ),
    ToolCallFamily(("olmo3",), (olmo.BEGIN,), frozenset({olmo.BEGIN, olmo.END}), begin=olmo.BEGIN, read=olmo.olmo),
    ToolCallFamily(
        ("hunyuan_v3",),
        (glm.HUNYUAN_MARK,),
        glm.HUNYUAN_KEEP,
        begin=glm.HUNYUAN_TAGS.begin,
        read=glm.hunyuan,
    ),
    ToolCallFamily(
        ("glm45", "glm47"),
        (glm.MARK,),
        glm.KEEP,
        begin=glm.TAGS.call,
        read=glm.glm,
    ),
    ToolCallFamily(
        ("hermes",),
        (hermes.BEGIN,),
        frozenset({hermes.BEGIN, hermes.END}),
        begin=hermes.BEGIN,
        json_end=hermes.END,
        read=hermes.hermes,
    ),
    ToolCallFamily(
        ("pythonic", "llama4_pythonic"), ("[func_name1(",), frozenset({*TAGS, TAG_END}), read=llama_pythonic
    ),
    ToolCallFamily(("llama3_json", "llama4_json"), (*TAGS, JSON_FORM), frozenset({*TAGS, TAG_END}), read=llama_json),
    ToolCallFamily(("gemma3",), ("<start_of_turn>",), frozenset(), read=gemma3),
)

HARMONY_REASONING = ReasoningFamily(
    ("openai_gptoss",), ("<|channel|>",), harmony.KEEP, ("gpt_oss",), thought=harmony.THOUGHT
)

REASONING_PARSERS = (
    HARMONY_REASONING,
    ReasoningFamily(
        ("gemma4",), ("<|channel>",), frozenset({"<|channel>", gemma4.THOUGHT.end}), thought=gemma4.THOUGHT
    ),
    _reasoning(("mistral",), mistral.THOUGHT, mistral.THOUGHT.begin),
    _reasoning(("seed_oss",), qwen3_coder.SEED_THOUGHT, qwen3_coder.SEED_THOUGHT.begin),
    _reasoning(("cohere_command3", "cohere_command4"), cohere.THOUGHT, cohere.THOUGHT.begin),
    _reasoning(("solar_open",), solar.THOUGHT, "<|begin|>assistant<|think|>"),
    _reasoning(("minimax_m3",), minimax.THOUGHT, minimax.THOUGHT.begin),
    _reasoning(("apertus",), apertus.THOUGHT, apertus.THOUGHT.begin),
    _reasoning(("hunyuan_v3",), glm.HUNYUAN_THOUGHT, "'<think{}>'"),
    _reasoning(("apriel",), apriel.THOUGHT, apriel.ANSWER),
    _reasoning(("deepseek_r1", "deepseek_v3", "qwen3"), THINK, THINK.begin, THINK.end, model_types=("deepseek_v4",)),
)

DESCRIBED_TOOLS_PARSER = "hermes"
"""Parser for chat templates that do not read tools; the tools are then described in its format."""

DERIVED = "template"
"""Name of a parser that is derived from the chat template itself; see `derivation`."""

F = TypeVar("F", bound=Family)


def tool_call_parser_for(chat_template: str, model_type: str | None = None) -> str | None:
    """Returns the name of the tool call parser that a chat template implies; None if it implies none.

    For models without a template (`chat_template` is ""), `model_type` of config.json decides.
    """
    return _detected(TOOL_CALL_PARSERS, chat_template, model_type)


def reasoning_parser_for(chat_template: str, model_type: str | None = None) -> str | None:
    """Returns the name of the reasoning parser that a chat template implies; None if it implies none."""
    return _detected(REASONING_PARSERS, chat_template, model_type)


def find(field: str, families: Sequence[F], name: object) -> F:
    """Returns a parser by name.

    Raises InvalidParameterError, which lists the names.
    """
    known = {each: family for family in families for each in family.names}
    if isinstance(name, str) and name in known:
        return known[name]
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0) if isinstance(name, str) else []
    names = ", ".join([*nearest, *(each for each in known if each not in nearest)])
    raise InvalidParameterError(field, name, f"one of {names}")


def _detected(families: Sequence[Family], chat_template: str, model_type: str | None) -> str | None:
    for family in families:
        if not chat_template and model_type in family.model_types:
            return family.names[0]
        marked = any(mark in chat_template for mark in family.marks)
        if marked and not any(other in chat_template for other in family.unless):
            return family.names[0]
    return None
