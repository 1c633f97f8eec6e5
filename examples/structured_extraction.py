"""Structured extraction: converts a dataclass to a JSON schema and fills it from text.

    python examples/structured_extraction.py [MODEL]

The schema is enforced token by token, so the output always parses into the class. The values are only as good as the
model: the embedded one is a toy and reports the wrong animal.
"""

import json
import sys
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from ferrule import LLM, SamplingParams, StructuredOutputsParams

T = TypeVar("T")


@dataclass
class Character:
    """Main character of a story."""

    animal: Literal["cat", "dog", "duck", "fish", "fox"]
    name: str
    age: int
    friends: list[str]


def schema_of(kind: Any) -> dict[str, Any]:
    """Returns the JSON schema of a type hint."""
    if get_origin(kind) is Literal:
        return {"enum": list(get_args(kind))}
    if get_origin(kind) is list:
        return {"type": "array", "items": schema_of(get_args(kind)[0]), "maxItems": 3}
    # The bounds end the output of a model that repeats itself.
    return {
        str: {"type": "string", "minLength": 1, "maxLength": 20},
        int: {"type": "integer", "minimum": 0, "maximum": 1000},
        bool: {"type": "boolean"},
    }[kind]


def extract(llm: LLM, text: str, kind: type[T]) -> T:
    """Extracts an instance of a dataclass from a text."""
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]  # pyright: ignore[reportArgumentType]
    schema = {
        "type": "object",
        "properties": {name: schema_of(hints[name]) for name in names},
        "required": names,
        "additionalProperties": False,
    }
    params = SamplingParams(
        temperature=0,
        max_tokens=200,
        structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=True),
    )
    question = f"{text}\n\nWho is it about? Answer in JSON with {', '.join(names)}."
    answer = llm.chat([{"role": "user", "content": question}], params)[0].outputs[0]
    if answer.finish_reason != "stop":
        raise ValueError(f"the output was cut off by max_tokens: {answer.text!r}")
    return kind(**json.loads(answer.text))


def main(model: str | None = None) -> None:
    """Extracts from one story."""
    story = "Once upon a time, there was a kind fox named Anna, three years old, who played with Tom and Lily."
    with LLM(model) as llm:
        print(extract(llm, story, Character))


if __name__ == "__main__":
    main(*sys.argv[1:2])
