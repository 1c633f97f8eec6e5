"""llama.cpp computes transformers' results from the files that `gguf_convert` writes, so they are valid.

llama-cpp-python takes a quarter of an hour to build, so it is not a dependency; without it these tests are skipped.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from conftest import TINY
from ferrule import LLM, SamplingParams
from gguf_convert import convert
from test_gguf_archs import CASES, GOLDEN, VARIANTS

PEERS = Path(__file__).parents[1] / "benches" / "peers" / ".work"
PYTHONS = sorted(PEERS.glob("llama.cpp-*/bin/python"))
"""Directory of the environments of benches/peers/install."""

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not PYTHONS, reason="needs llama.cpp: benches/peers/install llama.cpp-avx2"),
]

TOLERANCE = 1e-3
"""Tolerance, relative to the largest logit: llama.cpp computes GELU with a table of f16."""
OTHERWISE = {
    "cohere": "converters drop the head, as published models have none",
    "cohere2": "converters drop the head, as published models have none",
    "deepseek_v2_lite": "recognized by its number of layers",
    "dots1": "as many key-value heads as query heads",
    "exaone4": "windows are recognized by the number of layers",
    "hunyuan_v1_moe": "as many experts for a token in all layers",
    "olmo2_bias": "no biases",
    "olmoe": "as many key-value heads as query heads",
    "phi4_mini_short": "factors are chosen by the context that is allowed, not by the one that is there",
}
"""Cases with an option that llama.cpp does not read, and the value that it assumes."""
TEXTS = [
    *("The capital of France is", "The sun is", "A dog is an animal that", "The largest planet is", "Water freezes at"),
    *("Once upon a time,", "def main():"),
]
SURE = {"F16": 7, "Q8_0": 5}
"""Number of cases without near ties in the continuation: llama.cpp rounds activations for Q8_0 weights."""

READ_LOGITS = """
import ctypes, json, sys
import llama_cpp, numpy

@llama_cpp.llama_log_callback
def quiet(level, text, _):
    pass

llama_cpp.llama_log_set(quiet, ctypes.c_void_p())
for file, prompts, tokens, out in json.load(sys.stdin):
    llm = llama_cpp.Llama(file, n_ctx=256, n_threads=1, n_batch=256, logits_all=True, type_k=0, type_v=0, verbose=False)
    answers = []
    for prompt in prompts:
        ids = llm.tokenize(prompt.encode(), special=True) if isinstance(prompt, str) else prompt
        llm.reset()
        llm.eval(ids)
        logits = llm.scores[: len(ids)].copy()
        greedy = []
        for _ in range(tokens):
            greedy.append(int(numpy.argmax(llm.scores[llm.n_tokens - 1])))
            llm.eval(greedy[-1:])
        answers.append((ids, greedy))
    numpy.savez(out, logits=logits, answers=json.dumps(answers))
"""


def llama_cpp(
    file: Path, prompts: Sequence[str | list[int]], tokens: int = 0
) -> tuple[npt.NDArray[np.float32], list[list[list[int]]]]:
    """Returns the logits of the last prompt, and ids and greedy continuation of each prompt."""
    out = file.with_suffix(".npz")
    job = json.dumps([(str(file), prompts, tokens, str(out))])
    subprocess.run([PYTHONS[0], "-c", READ_LOGITS], input=job, text=True, check=True, timeout=300)
    with np.load(out) as read:
        return read["logits"], json.loads(str(read["answers"]))


@pytest.mark.parametrize("case", [case for case in CASES + VARIANTS if case not in OTHERWISE])
def test_llama_cpp_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    directory = next(path for path in (GOLDEN / "logits" / case, GOLDEN / "variants" / case) if path.exists())
    with np.load(directory / "golden.npz") as golden:
        ids, expected = golden["input_ids"].tolist(), golden["logits"]
    logits, _ = llama_cpp(convert(directory, tmp_path / "model.gguf"), [ids])
    assert float(np.abs(logits - expected).max() / np.abs(expected).max()) <= TOLERANCE


@pytest.mark.parametrize("storage", ["F16", "Q8_0"])
def test_llama_cpp_greedy_outputs_equal_ferrule(storage: str, tmp_path: Path) -> None:
    file = convert(TINY, tmp_path / "tiny.gguf", storage)
    texts = TEXTS[: SURE[storage]]
    _, answers = llama_cpp(file, texts, 24)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(file, quantization="f32") as llm:
        for text, (ids, greedy) in zip(texts, answers, strict=True):
            assert llm.tokenize(text) == ids
            assert llm.generate(text, params)[0].outputs[0].token_ids == greedy
