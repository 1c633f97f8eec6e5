# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "instructor[anthropic]==1.17.0",
# ]
#
# [tool.uv]
# exclude-newer = "2026-11-23T00:00:00Z"
# ///
"""Instructor: a pydantic object in each of its modes for the clients of OpenAI and Anthropic, and as a stream."""

import sys
import warnings
from collections.abc import Iterable
from typing import Any

import instructor
from anthropic import Anthropic
from instructor import Mode
from openai import OpenAI
from pydantic import BaseModel

url, model = sys.argv[1:]
openai = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
anthropic = Anthropic(base_url=url, api_key="none", max_retries=0)
OPENAI_MODES = (
    Mode.TOOLS,
    Mode.TOOLS_STRICT,
    Mode.FUNCTIONS,
    Mode.JSON,
    Mode.JSON_O1,
    Mode.JSON_SCHEMA,
    Mode.MD_JSON,
    Mode.RESPONSES_TOOLS,
)
ANTHROPIC_MODES = (
    Mode.ANTHROPIC_TOOLS,
    Mode.ANTHROPIC_REASONING_TOOLS,
    Mode.ANTHROPIC_JSON,
)


class Report(BaseModel):
    """The weather in a city."""

    city: str
    celsius: int


REPORT = {"city": "Paris", "celsius": 21}
messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
asked: dict[str, Any] = {"model": model, "messages": messages, "max_retries": 0}
warnings.simplefilter("ignore", DeprecationWarning)  # older names of modes

for mode in OPENAI_MODES:
    client = instructor.from_openai(openai, mode=mode)
    assert client.create(**asked, response_model=Report).model_dump() == REPORT, mode
    *_, last = client.create_partial(**asked, response_model=Report)
    assert last.model_dump() == REPORT, mode
client = instructor.from_openai(openai, mode=Mode.PARALLEL_TOOLS)
assert [each.model_dump() for each in client.create(**asked, response_model=Iterable[Report])] == [REPORT]

for mode in ANTHROPIC_MODES:
    client = instructor.from_anthropic(anthropic, mode=mode)
    assert client.create(**asked, response_model=Report, max_tokens=200).model_dump() == REPORT, mode
client = instructor.from_anthropic(anthropic, mode=Mode.ANTHROPIC_PARALLEL_TOOLS)
assert [each.model_dump() for each in client.create(**asked, response_model=Iterable[Report], max_tokens=200)] == [
    REPORT
]
