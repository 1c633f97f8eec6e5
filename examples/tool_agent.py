"""Tool calling agent: the model calls Python functions in a loop and then answers.

    python examples/tool_agent.py [MODEL]

Models trained for tool calling have their own call format, which `llm.chat(messages, tools=TOOLS,
tool_call_parser="auto")` parses. The embedded model is not, so the call is forced, as with OpenAI's `tool_choice`
`"required"`: structured output restricts it to the schema of the tools. Every call is therefore valid; whether it is
useful depends on the model.
"""

import json
import sys
from typing import Any, Literal

from ferrule import LLM, SamplingParams, StructuredOutputsParams
from ferrule._text.chat import tool_schemas

MAX_CALLS = 4
"""Maximum number of tool calls before the answer."""
CAPITALS = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo"}
POPULATIONS = {"Paris": 2.1, "Rome": 2.7, "Tokyo": 14.2}


def capital_of(country: Literal["France", "Italy", "Japan"]) -> str:
    """Looks up the capital of a country.

    Args:
        country: The country.

    """
    return CAPITALS[country]


def population_of(city: Literal["Paris", "Rome", "Tokyo"]) -> float:
    """Looks up the population of a city, in millions.

    Args:
        city: The city.

    """
    return POPULATIONS[city]


TOOLS = {"capital_of": capital_of, "population_of": population_of}


def object_of(**properties: Any) -> dict[str, Any]:
    """Returns the schema of an object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def call_schema() -> dict[str, Any]:
    """Returns the schema of a call: the name of a tool and its arguments."""
    functions = [schema["function"] for schema in tool_schemas(list(TOOLS.values()))]
    return {
        "anyOf": [
            object_of(name={"const": function["name"]}, arguments=object_of(**function["parameters"]["properties"]))
            for function in functions
        ]
    }


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
