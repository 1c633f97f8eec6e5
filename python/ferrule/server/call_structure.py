"""Structures of outputs that consist of tool calls, or of tool calls or an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, cast

from ferrule._api.async_llm import AsyncLLM
from ferrule._params.closed_objects import close_objects, strict_schema
from ferrule._params.structured import StructuredOutputsParams
from ferrule._text.parsers import MessageFormat
from ferrule.errors import InvalidParameterError

DEFINITIONS = "#/$defs/"
JSON_CALLS = "llama3_json"
"""Parser of calls as JSON."""
MAX_GRAMMAR_BYTES = 1 << 16
"""Longest grammar that the compiler reads."""
_ANSWER = "answer"
"""Name of the answer's schema among the definitions, whose other names are numbers."""
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""White space between the parts of JSON, as the compiler allows it in schemas."""
_CALL_OPTIONS = {"x-guidance": {"whitespace_pattern": " "}}
"""Options of the compiler: white space in calls, as chat templates write it."""


def tool_call_schema(
    tools: Sequence[Mapping[str, Any]], *, several: bool, strict: Set[str] = frozenset()
) -> StructuredOutputsParams:
    """Returns the structure of a JSON list of one call of a tool, or with `several` of any number of calls.

    `strict` has the names of the tools whose schemas are read as OpenAI's `strict` defines.
    """
    schema = {**_call_list(tools, several=several), "$defs": _definitions(tools, strict)}
    # Small models would otherwise generate white space until the token limit.
    return StructuredOutputsParams(json=schema, disable_any_whitespace=True)


@dataclass(frozen=True, kw_only=True)
class CallOrAnswer:
    """An answer as JSON, or calls of tools instead of it.

    The methods raise InvalidParameterError.
    """

    answer: StructuredOutputsParams
    """Structure of the answer: a JSON schema, or any JSON object."""
    tools: Sequence[Mapping[str, Any]]
    several: bool
    """Whether there may be several calls."""
    strict: Set[str]
    """Names of the tools whose schemas are read as OpenAI's `strict` defines."""

    def as_json(self) -> StructuredOutputsParams:
        """Returns the structure of JSON that is the answer, a call, or a list of calls."""
        answer = {"$ref": DEFINITIONS + _ANSWER}
        forms = [answer, *_calls(self.tools, "parameters"), _call_list(self.tools, several=self.several)]
        try:
            own = _rebase_references(self._schema(), _ANSWER)
        except RecursionError:
            raise self._invalid("a schema with less nesting") from None
        schema = {"anyOf": forms, "$defs": {_ANSWER: own, **_definitions(self.tools, self.strict)}}
        return replace(self.answer, json=schema, json_object=None)

    def in_format(self, message_format: MessageFormat, llm: AsyncLLM) -> StructuredOutputsParams:
        """Returns the structure of an output that is the answer, or calls in the format of the model.

        Calls of formats other than JSON in tags are constrained only by the marker with which they begin.
        """
        schema = self._schema()
        if not isinstance(schema, dict):
            raise self._invalid("an object")
        begin = _in_grammar(message_format.call_begin, llm)
        if message_format.json_call_end:
            rules = [
                f"calls: call{'+' if self.several else ''}",
                f"call: {begin} rest SPACE?",
                *_rest_of_call(self.tools, self.strict, message_format, llm),
            ]
        else:
            inside = " | ".join(["TEXT", *(_in_grammar(each, llm) for each in sorted(message_format.keep))])
            rules = [f"calls: {begin} ({inside})*", r"TEXT: /(.|\n)+/"]
        answer = json.dumps(cast("dict[str, Any]", schema) | self._options())
        return StructuredOutputsParams(grammar="\n".join(["start: answer | calls", f"answer: %json {answer}", *rules]))

    def _schema(self) -> Any:
        if self.answer.json is None:
            return {"type": "object"}
        try:
            return json.loads(close_objects(cast("str", self.answer.json)))
        except (ValueError, RecursionError) as error:
            raise self._invalid(f"a JSON schema ({error})") from None

    def _invalid(self, requirement: str) -> InvalidParameterError:
        return InvalidParameterError("structured_outputs.json", self.answer.json, requirement)

    def _options(self) -> dict[str, Any]:
        """Returns the compiler's options for white space, which a schema in a grammar has itself."""
        if self.answer.disable_any_whitespace:
            return {"x-guidance": {"whitespace_flexible": False}}
        return {"x-guidance": {"whitespace_pattern": self.answer.whitespace_pattern or _WHITESPACE}}


def text_with_calls(
    tools: Sequence[Mapping[str, Any]], strict: Set[str], message_format: MessageFormat, llm: AsyncLLM
) -> StructuredOutputsParams | None:
    """Returns the structure of free text in which calls match their tools.

    Returns None for formats other than JSON in tags, for models whose tokens do not map to bytes, and where the schemas
    together are longer than a grammar may be. Raises InvalidParameterError.
    """
    if not message_format.json_call_end or llm.token_bytes(0) is None:
        return None
    begin = _in_grammar(message_format.call_begin, llm)
    is_text = begin.startswith('"')
    others = message_format.keep - {message_format.call_begin, message_format.json_call_end}
    special = [each for each in (_in_grammar(each, llm) for each in sorted(others)) if not each.startswith('"')]
    rules = [
        "%llguidance {}",
        "start: (call | marker)* end" if special else "start: call* end",
        "end: TEXT",
        "call: begin rest",
        f"begin[lazy]: TEXT {begin}" if is_text else f"begin: TEXT {begin}",
        *([f"marker: TEXT ({' | '.join(special)})"] if special else []),
        r"TEXT: /(.|\n)*/",
        *_rest_of_call(tools, strict, message_format, llm),
    ]
    grammar = "\n".join(rules)
    return StructuredOutputsParams(grammar=grammar) if len(grammar.encode()) <= MAX_GRAMMAR_BYTES else None


def _rest_of_call(
    tools: Sequence[Mapping[str, Any]], strict: Set[str], message_format: MessageFormat, llm: AsyncLLM
) -> list[str]:
    """Returns the rules of a call of JSON in tags after its first marker."""
    calls = {"anyOf": _calls(tools, "arguments"), "$defs": _definitions(tools, strict)}
    call = close_objects(json.dumps(calls | _CALL_OPTIONS))
    end = _in_grammar(message_format.json_call_end, llm)
    return [f"rest: SPACE? %json {call} SPACE? {end}", r"SPACE: /[ \n]{1,2}/"]


def _in_grammar(marker: str, llm: AsyncLLM) -> str:
    """Returns a marker in a Lark grammar, where text does not match special tokens."""
    tokens = llm.tokenize(marker, add_special_tokens=False)
    if len(tokens) == 1 and not llm.detokenize(tokens, skip_special_tokens=True):
        return f"<[{tokens[0]}]>"
    return json.dumps(marker)


def _call_list(tools: Sequence[Mapping[str, Any]], *, several: bool) -> dict[str, Any]:
    calls = _calls(tools, "arguments")
    one_or_more = {"type": "array", "minItems": 1, "items": calls[0] if len(calls) == 1 else {"anyOf": calls}}
    return one_or_more if several else {**one_or_more, "maxItems": 1}


def _calls(tools: Sequence[Mapping[str, Any]], arguments: str) -> list[dict[str, Any]]:
    """Returns the schema of a call of each tool; `arguments` is the name of the member with its arguments."""
    return [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                arguments: {"$ref": f"{DEFINITIONS}{index}"},
            },
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]


def _definitions(tools: Sequence[Mapping[str, Any]], strict: Set[str]) -> dict[str, Any]:
    """Returns the schemas of the arguments, with their references rebased to their new place.

    Raises InvalidParameterError.
    """
    definitions: dict[str, Any] = {}
    for index, tool in enumerate(tools):
        schema: object = tool["function"].get("parameters") or {"type": "object"}
        if tool["function"]["name"] in strict:
            schema = strict_schema(schema)
        try:
            definitions[str(index)] = _rebase_references(schema, str(index))
        except RecursionError:
            field = f"tools[{index}].function.parameters"
            raise InvalidParameterError(field, {}, "a schema with less nesting") from None
    return definitions


def _rebase_references(schema: object, place: str) -> object:
    if isinstance(schema, Mapping):
        return {
            key: f"{DEFINITIONS}{place}{value[1:]}"
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _rebase_references(value, place)
            for key, value in cast("Mapping[str, object]", schema).items()
        }
    if isinstance(schema, list):
        return [_rebase_references(value, place) for value in cast("list[object]", schema)]
    return schema
