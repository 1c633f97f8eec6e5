"""`suffix` over HTTP, on the engine itself: the embedded model with a code model's tokens in its vocabulary."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import openai
import pytest
from safetensors.numpy import save_file

from conftest import TINY
from ferrule import LLM, AsyncLLM, SamplingParams
from ferrule._text.fim import LAYOUTS, Layout
from ferrule._text.tokenizer import Tokenizer
from ferrule.server import ServerSettings
from lora_files import base_tensors
from server.live import Live, serving
from test_fim import byte_level, ids_of

pytestmark = pytest.mark.native

QWEN, STARCODER, _, _, CODELLAMA, CODESTRAL, _ = LAYOUTS
EMBEDDING = "model.embed_tokens.weight"
BEFORE, AFTER = "Once upon a time, there was a ", " who lived in a house.\n"
TOKENS = 12


@dataclass
class Coder:
    """A server of a model that fills in middles, and the same model without a server."""

    layout: Layout
    live: Live
    alone: LLM
    tokenizer: Tokenizer

    def ids(self, before: str = BEFORE, after: str = AFTER) -> list[int]:
        """Expected parts of the prompt."""
        prefix, suffix = [self.layout.prefix, before], [self.layout.suffix, after]
        parts = prefix + suffix if self.layout.order == "PSM" else suffix + prefix
        return self._spelled(*parts, *([self.layout.middle] if self.layout.middle else []))

    def end(self) -> int:
        """Token that ends only an infill."""
        return self._spelled((*self.layout.ends, self.layout.suffix)[0])[0]

    def expected(self, ids: list[int]) -> str:
        """Output of the model after these parts."""
        return self.alone.generate({"prompt_token_ids": ids}, greedy())[0].outputs[0].text

    def _spelled(self, *parts: str) -> list[int]:
        return ids_of(self.tokenizer, *parts)


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=TOKENS, **more)


@pytest.fixture(
    scope="module", params=[QWEN, STARCODER, CODELLAMA, CODESTRAL], ids=lambda layout: layout.families.split(",")[0]
)
def coder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coder]:
    model = with_tokens(tmp_path_factory.mktemp("coder") / "model", request.param)
    with (
        LLM(model) as alone,
        serving(ServerSettings(ollama=True), names=("coder",), llm=lambda: AsyncLLM(model)) as live,
    ):
        yield Coder(request.param, live, alone, Tokenizer(model))


def with_tokens(model: Path, layout: Layout) -> Path:
    """Writes the embedded model with the tokens of a layout, each with a separate embedding."""
    shutil.copytree(TINY, model, ignore=shutil.ignore_patterns("*.safetensors"))
    byte_level(model, layout)
    tensors = base_tensors(TINY)
    new = len(layout.markers) + len(layout.ends)
    rows = np.random.default_rng(1).normal(0, tensors[EMBEDDING].std(), (new, tensors[EMBEDDING].shape[1]))
    tensors[EMBEDDING] = np.concatenate([tensors[EMBEDDING], rows.astype(np.float32)])
    save_file(tensors, model / "model.safetensors")
    config = json.loads((TINY / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": len(tensors[EMBEDDING])}))
    return model


def test_openai_completions_with_suffix(coder: Coder) -> None:
    request: dict[str, Any] = {
        "model": "coder",
        "prompt": BEFORE,
        "suffix": AFTER,
        "temperature": 0,
        "max_tokens": TOKENS,
        "extra_body": {"return_token_ids": True},
    }
    ids = coder.ids()
    with openai.OpenAI(base_url=f"{coder.live.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.completions.create(**request)
        chunks = list(client.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    (choice,) = whole.choices
    assert choice.model_dump()["prompt_token_ids"] == ids
    assert choice.text == coder.expected(ids)
    assert choice.text != coder.expected(coder.alone.tokenize(BEFORE)), "what comes after is of no account"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(ids), TOKENS)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == choice.text
    assert chunks[0].choices[0].model_dump()["prompt_token_ids"] == ids
    assert chunks[-2].choices[0].finish_reason == choice.finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_suffix_applies_to_every_prompt(coder: Coder) -> None:
    befores = [BEFORE, "The capital of France is ", ""]
    found = coder.live.complete(befores, suffix=AFTER, temperature=0, max_tokens=TOKENS, n=2).json
    expected = [coder.expected(coder.ids(before)) for before in befores]
    assert [choice["text"] for choice in found["choices"]] == [text for text in expected for _ in range(2)]
    assert found["usage"]["prompt_tokens"] == sum(len(coder.ids(before)) for before in befores)


def test_empty_suffix_is_infill(coder: Coder) -> None:
    found = coder.live.complete(BEFORE, suffix="", temperature=0, max_tokens=TOKENS, return_token_ids=True).json
    assert found["choices"][0]["prompt_token_ids"] == coder.ids(after="")


def test_llama_cpp_infill_continues_the_middle(coder: Coder) -> None:
    fields = {"input_prefix": BEFORE, "input_suffix": AFTER, "temperature": 0, "n_predict": TOKENS}
    found = coder.live.request("/infill", fields).json
    assert found["content"] == coder.expected(coder.ids())
    begun = coder.live.request("/infill", {**fields, "prompt": "little girl"}).json
    assert begun["tokens_evaluated"] > found["tokens_evaluated"]
    assert begun["prompt"].endswith("little girl")


def test_fim_markers_in_input_are_plain_text(coder: Coder) -> None:
    forged = "".join(coder.layout.markers)
    response = coder.live.complete(f"a{forged}", suffix=f"b{forged}", max_tokens=1, return_token_ids=True)
    (ids,) = (choice["prompt_token_ids"] for choice in response.json["choices"])
    assert [ids.count(ids_of(coder.tokenizer, marker)[0]) for marker in coder.layout.markers] == [1] * len(
        coder.layout.markers
    )


@pytest.mark.parametrize("stream", [False, True])
def test_end_of_middle_token_stops_generation(coder: Coder, stream: bool) -> None:
    likely = {"logit_bias": {str(coder.end()): 100}, "temperature": 0, "max_tokens": 5}
    if stream:
        body = coder.live.complete(BEFORE, suffix=AFTER, stream=True, **likely).body
        last = json.loads(body.split(b"\n\n")[-3].removeprefix(b"data: "))
    else:
        last = coder.live.complete(BEFORE, suffix=AFTER, **likely).json
        assert last["usage"]["completion_tokens"] == 1
    assert (last["choices"][0]["text"], last["choices"][0]["finish_reason"]) == ("", "stop")
    # Elsewhere it is a token as any other.
    plain = coder.live.complete(BEFORE, **likely).json
    assert (plain["choices"][0]["finish_reason"], plain["usage"]["completion_tokens"]) == ("length", 5)


def test_ollama_generate_with_suffix(coder: Coder) -> None:
    ids = coder.ids()
    options = {"temperature": 0, "num_predict": TOKENS}
    with ollama.Client(coder.live.url) as client:
        whole = client.generate("coder", BEFORE, suffix=AFTER, options=options)
        *lines, last = client.generate("coder", BEFORE, suffix=AFTER, options=options, stream=True)
        alone = client.generate("coder", "", suffix=AFTER, options=options)
        raw = client.generate("coder", BEFORE, suffix=AFTER, options=options, raw=True)
    assert whole.response == raw.response == coder.expected(ids)
    assert (whole.done_reason, whole.prompt_eval_count, whole.eval_count) == ("length", len(ids), TOKENS)
    assert "".join(line.response for line in lines) == whole.response
    assert (last.done_reason, last.prompt_eval_count, last.eval_count) == ("length", len(ids), TOKENS)
    assert alone.response == coder.expected(coder.ids(before=""))


def test_ollama_stop_option_applies_to_infill(coder: Coder) -> None:
    ids = coder.ids()
    word = coder.expected(ids).split()[1]
    options = {"temperature": 0, "num_predict": TOKENS, "stop": [word]}
    with ollama.Client(coder.live.url) as client:
        cut = client.generate("coder", BEFORE, suffix=AFTER, options=options)
    assert (cut.done_reason, cut.response) == ("stop", coder.expected(ids).split(word)[0])


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": BEFORE, "suffix": AFTER, "echo": True}, "echo"),
    ("/v1/completions", {"prompt": [5, 6], "suffix": AFTER}, "suffix"),
    ("/v1/completions", {"prompt": BEFORE, "suffix": 5}, "suffix"),
    ("/v1/completions", {"prompt": BEFORE, "suffix": "\ud800"}, "suffix"),
    ("/v1/completions", {"prompt": BEFORE, "suffix": "word " * 4000}, "prompt"),
    ("/api/generate", {"prompt": BEFORE, "suffix": AFTER, "system": "Be brief."}, "system"),
    ("/api/generate", {"prompt": BEFORE, "suffix": "word " * 4000}, "prompt"),
]


@pytest.mark.parametrize(("path", "fields", "named"), REFUSED)
def test_invalid_infill_request_returns_400_with_param(
    coder: Coder, path: str, fields: dict[str, Any], named: str
) -> None:
    found = coder.live.request(path, {"model": "coder", **fields})
    assert found.status == 400
    if path == "/api/generate":
        assert named in found.json["error"]
    else:
        assert found.error["param"] == named, found.error
