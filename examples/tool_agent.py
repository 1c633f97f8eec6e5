"""Tool calling agent: the model calls Python functions in a loop and then answers.

    python examples/tool_agent.py [MODEL]

Models trained for tool calling have a call format, which `llm.chat(messages, tools=[capital_of, population_of],
tool_call_parser="auto")` parses. The embedded model is not one of them, so the call is forced, as with OpenAI's
`tool_choice` `"required"`: structured output restricts it to a schema of all calls. Every call is therefore valid;
whether it is useful depends on the model.
"""

import json
import sys
from typing import Any

from ferrule import LLM, SamplingParams, StructuredOutputsParams

MAX_CALLS = 4
"""Maximum number of tool calls before the answer."""
CAPITALS = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo"}
POPULATIONS = {"Paris": 2.1, "Rome": 2.7, "Tokyo": 14.2}


def capital_of(country: str) -> str:
    """Looks up the capital of a country."""
    return CAPITALS[country]


def population_of(city: str) -> float:
    """Looks up the population of a city, in millions."""
    return POPULATIONS[city]


TOOLS = {"capital_of": capital_of, "population_of": population_of}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "capital_of": {"country": {"enum": list(CAPITALS)}},
    "population_of": {"city": {"enum": list(POPULATIONS)}},
}
"""JSON schemas of the arguments of each tool."""


def object_of(**properties: Any) -> dict[str, Any]:
    """Returns the schema of an object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def call_schema() -> dict[str, Any]:
    """Returns the schema of a call: the name of a tool and its arguments."""
    calls = [object_of(name={"const": name}, arguments=object_of(**ARGUMENTS[name])) for name in TOOLS]
    return {"anyOf": calls}


def converse(llm: LLM, question: str) -> list[dict[str, Any]]:
    """Returns the conversation from the question to the answer."""
    structure = StructuredOutputsParams(json=call_schema(), disable_any_whitespace=True)
    calling = SamplingParams(temperature=0, max_tokens=100, structured_outputs=structure)
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for _ in range(MAX_CALLS):
        text = llm.chat(messages, calling)[0].outputs[0].text
        if any(message["content"] == text for message in messages):
            break  # a repeated call gives no new information
        call = json.loads(text)
        result = TOOLS[call["name"]](**call["arguments"])
        messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": json.dumps(result)}]
    messages.append({"role": "user", "content": question})
    answer = llm.chat(messages, SamplingParams(temperature=0, max_tokens=60))[0].outputs[0].text
    return [*messages, {"role": "assistant", "content": answer}]


def main(model: str | None = None) -> None:
    """Asks one question and shows the whole conversation."""
    with LLM(model) as llm:
        for message in converse(llm, "What is the capital of France?"):
            print(f"{message['role']}: {message['content']}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
