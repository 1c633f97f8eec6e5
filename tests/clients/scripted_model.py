"""The embedded model with a script: it writes what an agent needs, as far as the request's grammar allows it.

A logits processor raises the next token of the first text of the script that continues the output. A grammar drops
tokens afterwards: text that a schema or a forced call does not allow is not written, so an answer that is to be JSON is
JSON only where the server enforces it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ferrule import AsyncLLM, SamplingParams
from ferrule._params.logits_processors import Logits, LogitsProcessor, Tokens
from ferrule._text.prompt import Prompt
from ferrule.outputs import StreamStep

RESULT = "21 degrees"
"""Result of the tool."""
VALUES: dict[str, object] = {"city": "Paris", "celsius": 21, "answer": RESULT}
"""Arguments of calls and members of JSON answers."""
REPORT = {name: VALUES[name] for name in ("city", "celsius")}
ANSWER = "It is 21 degrees in Paris."
TOOL = "get_weather"
RAISED = 1e6
"""Added to the logit of the first text's token; later texts have less."""


class ScriptedLLM(AsyncLLM):
    """Calls `get_weather` if it is offered; then reports its result, by a call of another tool if there is one."""

    async def stream_steps(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *given: Any, **options: Any
    ) -> AsyncGenerator[StreamStep, None]:
        """Adds the script of the prompt to a request."""
        text = self._rendered(prompt)
        end = self.tokenize("<|end|>", add_special_tokens=False)
        texts = [[*self.tokenize(each, add_special_tokens=False), *end] for each in script(text)]
        params = replace(sampling_params or SamplingParams(), logits_processors=[follow(texts)])
        async for step in super().stream_steps(prompt, params, *given, **options):
            yield step

    def _rendered(self, prompt: Prompt) -> str:
        if isinstance(prompt, str):
            return prompt
        return prompt["prompt"] if "prompt" in prompt else self.detokenize(prompt["prompt_token_ids"])


def follow(texts: list[list[int]]) -> LogitsProcessor:
    """Returns a logits processor that raises the next tokens of the texts that begin with the output."""

    def processor(output: Tokens, logits: Logits) -> None:
        for rank, tokens in enumerate(texts, 1):
            if len(output) < len(tokens) and output.tolist() == tokens[: len(output)]:
                logits[tokens[len(output)]] += RAISED / rank

    return processor


def script(prompt: str) -> list[str]:
    """Returns the texts that a model could write after a rendered conversation, the best one first."""
    report = json.dumps(REPORT, separators=(",", ":"))
    answers = [f"Here it is:\n\n```json\n{report}\n```", report] if "JSON" in prompt else [ANSWER, report]
    tools = list(offered_tools(prompt))
    if not tools:
        return answers
    reported = RESULT in prompt.rpartition("<|user|>")[2]
    called = min(tools, key=lambda tool: (tool["name"] == TOOL) == reported)
    calls = list(call_texts(called))
    return [*answers, *calls] if reported and called["name"] == TOOL else [*calls, *answers]


def call_texts(tool: Mapping[str, Any]) -> Iterator[str]:
    """Yields a call in the format of Hermes, and the list of calls that a forced call is."""
    arguments = {name: VALUES[name] for name in tool["parameters"].get("properties", {}) if name in VALUES}
    call = {"name": tool["name"], "arguments": arguments}
    yield f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    yield json.dumps([call], separators=(",", ":"))


def offered_tools(prompt: str) -> Iterator[Mapping[str, Any]]:
    """Yields the functions that the system message describes."""
    _, _, rest = prompt.partition("<tools>\n")
    listed, closed, _ = rest.partition("\n</tools>")
    for line in listed.splitlines() if closed else ():
        yield json.loads(line)["function"]
