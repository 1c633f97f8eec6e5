"""ferrule in lm-evaluation-harness, with small tasks in this directory.

The harness and its dependencies are an extra of 650 MB. Without it these tests are skipped, except in CI (`.ci/run`
installs it).
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ferrule import LLM, InvalidParameterError, PromptError
from ferrule._cli import main

TASKS = Path(__file__).parent / "harness_tasks"

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None and not os.environ.get("CI"),
        reason="lm-evaluation-harness is not installed: pip install 'ferrule[eval]'",
    ),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=64) as llm:
        yield llm


@pytest.fixture
def model(llm: LLM) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the harness imports
        from ferrule.harness import FerruleLM
    return FerruleLM(llm)


def instance(*arguments: Any) -> Any:
    return SimpleNamespace(args=arguments)


def test_tasks_from_the_command_line(tmp_path: Path) -> None:
    names = "ferrule_capitals,ferrule_continue,ferrule_stories"
    process = subprocess.run(
        [sys.executable, "-m", "ferrule", "eval", "--tasks", names, "--include-path", ".", "--json"],
        cwd=TASKS,
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    tasks = json.loads(process.stdout)["tasks"]
    assert list(tasks) == names.split(",")
    assert tasks["ferrule_capitals"]["metrics"]["acc"] == 1
    assert tasks["ferrule_continue"]["metrics"]["exact_match"] == 1
    with LLM() as llm:
        stories = [json.loads(line)["text"] for line in (TASKS / "stories.jsonl").read_text().splitlines()]
        first = llm.info()["eos_token_ids"][:1]  # precedes a text if the tokenizer adds no special token
        tokens = [llm.tokenize(text, add_special_tokens=False) for text in stories]
        logprob = sum(llm.loglikelihood({"prompt_token_ids": first}, [ids])[0].logprob for ids in tokens)
    words = sum(len(re.split(r"\s+", text)) for text in stories)  # as the harness counts them
    expected = math.exp(-logprob / words)
    assert tasks["ferrule_stories"]["metrics"]["word_perplexity"] == pytest.approx(expected, rel=1e-6)


@pytest.fixture
def own_tasks(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Omits the tasks of the harness, whose thousands of files take 15 seconds to read, and its cache of data sets."""
    from datasets import config  # type: ignore[import-not-found]
    from lm_eval import tasks  # type: ignore[import-not-found]

    monkeypatch.setattr(tasks, "TaskManager", partial(tasks.TaskManager, include_defaults=False))
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.chdir(TASKS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("own_tasks")
def test_chat_template_and_limit(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--apply-chat-template", "--num-fewshot", "0", "--limit", "2")
    assert main(["eval", "--tasks", "ferrule_continue", "--include-path", ".", *options]) == 0
    output, errors = capsys.readouterr()
    assert "exact_match" in output
    assert "continuations: 100%" in errors
    assert "2/2" in errors


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("own_tasks")
def test_unknown_task_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--tasks", "no_such_task", "--include-path", "."]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors == "error: tasks must be names that `lm_eval ls tasks` lists, got ['no_such_task']\n"


def test_model_is_registered(model: Any) -> None:
    from lm_eval.api.registry import get_model  # type: ignore[import-not-found]

    assert get_model("ferrule") is type(model)


def test_loglikelihood_equals_library(model: Any, llm: LLM) -> None:
    pairs = [("The capital of France is", " Paris"), ("The capital of France is", " Rome"), ("Once ", "upon a")]
    answers = model.loglikelihood([instance(*pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (logprob, greedy) in zip(pairs, answers, strict=True):
        whole, before = llm.tokenize(context + continuation), llm.tokenize(context.rstrip())
        (score,) = llm.loglikelihood({"prompt_token_ids": before}, [whole[len(before) :]])
        assert (logprob, greedy) == (score.logprob, score.is_greedy)
    assert answers[0][0] > answers[1][0]
    ((logprob, _),) = model.loglikelihood([instance("", "Once upon")], disable_tqdm=True)
    prefix = {"prompt_token_ids": [model.prefix_token_id]}
    assert logprob == llm.loglikelihood(prefix, "Once upon")[0].logprob  # type: ignore[arg-type]


def test_contexts_are_truncated_on_the_left(model: Any, llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    context = list(range(100, 200))
    with caplog.at_level(logging.WARNING):
        ((logprob, _),) = model._loglikelihood_tokens([(None, context, [7, 8, 9])], disable_tqdm=True)
    assert "a context of 100 tokens was truncated to its last 60, so that 4 more tokens fit" in caplog.text
    assert logprob == llm.loglikelihood({"prompt_token_ids": context[-60:]}, [[7, 8, 9]])[0].logprob
    with pytest.raises(PromptError, match=r"fewer than max_model_len \(64\) tokens, got 64"):
        model._loglikelihood_tokens([(None, context, [7] * 63)], disable_tqdm=True)
    caplog.clear()
    text = "Once upon a time, there was a cat. " * 12
    with caplog.at_level(logging.WARNING):
        (answer,) = model.generate_until([instance(text, {"max_gen_toks": 8})], disable_tqdm=True)
    assert "was truncated to its last 56, so that 8 more tokens fit" in caplog.text
    from ferrule import SamplingParams

    prompt: Any = {"prompt_token_ids": llm.tokenize(text)[-56:]}
    assert answer == llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text


def test_rolling_loglikelihood_scores_every_token_once(model: Any, llm: LLM) -> None:
    text = "Once upon a time, there was a little cat. " * 15
    tokens = llm.tokenize(text, add_special_tokens=False)
    total, predicted, room = 0.0, 0, 62
    while predicted < len(tokens):
        end = min(predicted + room, len(tokens))
        before = [model.prefix_token_id] if not predicted else tokens[max(0, end - room - 1) : predicted]
        (score,) = llm.loglikelihood({"prompt_token_ids": before}, [tokens[predicted:end]])
        total, predicted = total + score.logprob, end
    assert len(tokens) > 2 * room
    assert model.loglikelihood_rolling([instance(text), instance("")], disable_tqdm=True) == [pytest.approx(total), 0]


def test_special_tokens_are_added_once(model: Any, llm: LLM) -> None:
    assert model.tok_encode("Once") == llm.tokenize("Once")
    model._first = [2]
    mark = llm.token_text(2)
    ids = llm.tokenize("Once", add_special_tokens=False)
    assert model.tok_encode("Once") == [2, *ids]
    assert model.tok_encode(mark + "Once") == [2, *ids]
    assert model.tok_encode("Once", add_special_tokens=False) == ids


def test_chat_template_equals_library(model: Any, llm: LLM) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    assert model.apply_chat_template(messages) == llm.apply_chat_template(messages)
    assert llm.tokenize(model.apply_chat_template(messages)) == llm.chat_prompt(messages)["prompt_token_ids"]
    begun = [*messages, {"role": "assistant", "content": "Hel"}]
    assert model.apply_chat_template(begun, add_generation_prompt=False).endswith("Hel")
    assert model.chat_template(True) == llm.chat_templates["default"]
    assert model.chat_template(False) is None


def test_generation_kwargs(model: Any) -> None:
    from ferrule.harness import generation_params

    params = generation_params({"until": ["\n", ""], "max_gen_toks": 5, "do_sample": False, "temperature": 0.7})
    assert (params.max_tokens, params.stop, params.temperature) == (5, ("\n",), 0)
    assert generation_params({"until": "x", "do_sample": True, "temperature": 0.7}).temperature == 0.7
    assert generation_params({"temperature": 0.5, "top_p": 0.9}).top_p == 0.9
    assert (generation_params({}).temperature, generation_params({}).max_tokens) == (0, 256)
    with pytest.raises(InvalidParameterError, match=r"generation_kwargs must be .*, got {'num_beams': 4}"):
        generation_params({"num_beams": 4})
