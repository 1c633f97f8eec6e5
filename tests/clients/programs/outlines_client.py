# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "outlines[ollama,openai]==1.3.3",
# ]
#
# [tool.uv]
# exclude-newer = "2026-11-23T00:00:00Z"
# ///
"""Outlines: JSON, choices, regular expressions and grammars through the clients of OpenAI, vLLM and Ollama."""

import re
import sys
from typing import Literal

import ollama
import openai
import outlines
from outlines.types import CFG, Regex
from pydantic import BaseModel

url, model = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
QUESTION = "What is the weather in Paris?"


class Report(BaseModel):
    """The weather in a city."""

    city: str
    celsius: int


vllm = outlines.from_vllm(client, model)
for llm in (outlines.from_openai(client, model), vllm, outlines.from_ollama(ollama.Client(url), model)):
    text = llm(QUESTION)
    assert text
    assert "".join(llm.stream(QUESTION)) == text
    assert Report.model_validate_json(llm(QUESTION, Report)) == Report(city="Paris", celsius=21)
    assert Report.model_validate_json("".join(llm.stream(QUESTION, Report))) == Report(city="Paris", celsius=21)

assert vllm(QUESTION, Literal["warm", "cold"]) in ("warm", "cold")
assert re.fullmatch("-?[0-9]{1,2}", vllm(QUESTION, Regex("-?[0-9]{1,2}")))
assert vllm(QUESTION, CFG('start: "warm" | "cold"')) in ("warm", "cold")
