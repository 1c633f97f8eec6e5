"""`LLMPredictor` and `build_processor`: rows of datasets on a Ray cluster."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import ray.data

import fakes
from conftest import TINY
from ferrule import LLM, InvalidParameterError, SamplingParams, StructuredOutputsParams, UnsupportedTaskError
from ferrule._vision.images import read_image
from ferrule.errors import EngineError
from ferrule.ray import LLMPredictor, ProcessorConfig, build_processor
from ferrule.ray.predictor import threads_of_each
from ferrule.ray.rows import columns_of, rows_of
from ferrule.ray.tasks import TASKS
from lora_files import random_adapter
from test_encoders import GOLDEN
from word_tokenizer import write_word_tokenizer

GREEDY = {"temperature": 0, "max_tokens": 8}
PARAMS = SamplingParams(temperature=0, max_tokens=8)
CLASSIFIER = GOLDEN / "modernbert_classifier_mean"
"""A model with three labels."""
CAPITALS = [f"The capital of {country} is" for country in ("France", "Japan", "Italy", "Peru", "Spain", "Norway")]


def test_processes_of_a_model_share_the_cpus_of_the_actor() -> None:
    assert threads_of_each(8, {}) == 8
    assert threads_of_each(8, {"tensor_parallel_size": 2}) == 4
    assert threads_of_each(8, {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}) == 1
    assert threads_of_each(0.5, {"tensor_parallel_size": 2}) == 1


def run(batch: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """Returns the rows of a batch with the output of a predictor in this process."""

    async def run() -> dict[str, Any]:
        predictor = LLMPredictor(**options)
        try:
            return await predictor(batch)
        finally:
            await predictor.aclose()

    columns = asyncio.run(run())
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def test_rows_are_plain_values() -> None:
    messages = np.empty(1, dtype=object)
    messages[0] = np.array([{"role": "user", "content": "Hi", "name": None}], dtype=object)
    batch = {"messages": messages, "model": np.array(["a"]), "sampling_params": [{"seed": np.int64(3), "n": None}]}
    (row,) = rows_of(batch)
    assert row == {
        "messages": [{"role": "user", "content": "Hi"}],
        "model": "a",
        "sampling_params": {"seed": 3},
    }
    assert [type(value) for value in (row["messages"], row["model"])] == [list, str]
    assert rows_of({"prompt": np.array([np.nan, "a"], dtype=object)}) == [{"prompt": None}, {"prompt": "a"}]
    with pytest.raises(InvalidParameterError, match="batch must be a dict of columns"):
        rows_of([1])


def test_columns_of_rows_with_different_columns() -> None:
    assert columns_of([{"a": 1}, {"b": 2}]) == {"a": [1, None], "b": [None, 2]}


def test_row_parameters_replace_those_of_the_predictor(fake_engine: type[fakes.Engine]) -> None:
    rows = run(
        {"prompt": ["A cat", "A cat", "A cat"], "sampling_params": [None, {"max_tokens": 2.0}, {"max_tokens": None}]},
        sampling_params={"max_tokens": 5, "ignore_eos": True, "temperature": 0},
    )
    assert [row["num_generated_tokens"] for row in rows] == [5, 2, 5]
    assert [row["error"] for row in rows] == [None, None, None]
    assert rows[1]["generated_tokens"] == rows[0]["generated_tokens"][:2]


def test_prompts_messages_and_token_ids(fake_engine: type[fakes.Engine]) -> None:
    conversation = [{"role": "user", "content": "Hi"}]
    with LLM() as llm:
        ids = llm.chat_prompt(conversation)["prompt_token_ids"]
    chat, tokens, prompt = run(
        {
            "prompt": [None, None, "Hi"],
            "messages": [conversation, None, None],
            "tokenized_prompt": [None, np.array(ids), None],
        },
        sampling_params=GREEDY,
    )
    assert chat["num_input_tokens"] == tokens["num_input_tokens"] == len(ids)
    assert chat["generated_tokens"] == tokens["generated_tokens"] != prompt["generated_tokens"]


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"prompt": None}, "InvalidParameterError: prompt must be a string in each row, got None"),
        ({"prompt": 3}, "InvalidParameterError: prompt must be a string in each row, got 3"),
        ({"prompt": "x " * 5000}, "PromptTooLongError: "),
        ({"tokenized_prompt": [10**9]}, "PromptError: "),
        ({"tokenized_prompt": "x"}, "PromptError: "),
        ({"messages": 3}, "ChatTemplateError: "),
        ({"messages": [{"role": "user"}, 3]}, "ChatTemplateError: "),
        ({"sampling_params": 3}, "InvalidParameterError: sampling_params must be a dict or None in each row"),
        ({"sampling_params": {"temperature": -1}}, "InvalidParameterError: temperature must be a number from 0 to 100"),
        (
            {"sampling_params": {"warmth": 1}},
            "InvalidParameterError: sampling_params.warmth is not supported, got 1; SamplingParams has no such field",
        ),
        (
            {"sampling_params": {"structured_outputs": {"shape": "a"}}},
            "InvalidParameterError: sampling_params.structured_outputs.shape is not supported, got 'a'; ",
        ),
        ({"sampling_params": {"n": 2}}, "InvalidParameterError: n must be 1, since a row has one completion"),
        (
            {"sampling_params": {"structured_outputs": {"json": "{", "regex": "a"}}},
            "InvalidParameterError: structured_outputs",
        ),
        ({"model": "polite"}, "InvalidParameterError: "),
        ({"model": 3}, "InvalidParameterError: model must be tiny or the name of an adapter, got 3"),
        ({"messages": [{"role": "user", "content": "Hi"}], "tools": 3}, "ChatTemplateError: "),
        ({"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": 3}, "InvalidParameterError: "),
    ],
)
def test_invalid_row_gets_an_error(fake_engine: type[fakes.Engine], values: dict[str, Any], error: str) -> None:
    names = ["prompt", *(name for name in values if name != "prompt")]
    good = {"prompt": "A cat"}
    bad = {"prompt": "A cat", **values}
    rows = run({name: [each.get(name) for each in (good, bad, good)] for name in names}, sampling_params=GREEDY)
    assert rows[0]["error"] is rows[2]["error"] is None
    assert rows[0]["generated_tokens"] == rows[2]["generated_tokens"]
    assert rows[1]["error"].startswith(error)
    assert rows[1]["generated_text"] is rows[1]["generated_tokens"] is None


@pytest.mark.parametrize("task", TASKS)
def test_batch_of_invalid_rows_has_all_columns(fake_engine: type[fakes.Engine], task: str) -> None:
    rows = run({"text": ["a", "b"]}, task_type=task)
    missing = "data_1" if task == "score" else "prompt"
    for row in rows:
        assert set(row) == {"text", *TASKS[task].columns, "error"}
        assert row["error"] == f"InvalidParameterError: {missing} must be a string in each row, got None"


@pytest.mark.parametrize("task", ["generate", "embed", "score"])
def test_output_has_the_columns_of_the_task(fake_engine: type[fakes.Engine], task: str) -> None:
    batch = {"prompt": ["a"], "data_1": ["a"], "data_2": ["b"]}
    (row,) = run(batch, task_type=task)
    assert set(row) == {*batch, *TASKS[task].columns, "error"}
    assert row["error"] is None


def test_engine_failure_and_unsupported_task_end_the_job(fake_engine: type[fakes.Engine]) -> None:
    with pytest.raises(UnsupportedTaskError, match="classif"):
        run({"prompt": ["A cat"]}, task_type="classify")
    fake_engine.dies_at = 1
    with pytest.raises(EngineError):
        run({"prompt": ["A cat"]})


def test_invalid_configuration_is_rejected(fake_engine: type[fakes.Engine]) -> None:
    for options, message in [
        ({"task_type": "draw"}, "task_type must be one of generate, embed, classify, score, got 'draw'"),
        ({"batch_size": 0}, "batch_size must be an integer from 1 to"),
        ({"concurrency": 0}, "concurrency must be an integer from 1 to"),
        ({"concurrency": (2, 1)}, "concurrency must be a number of actors, or a minimum and a maximum"),
        ({"concurrency": (1,)}, "concurrency must be a number of actors, or a minimum and a maximum"),
        ({"concurrency": ("1", 2)}, "concurrency must be an integer from 1 to 65536, got '1'"),
        ({"concurrency": (1, 2.0)}, "concurrency must be an integer from 1 to 65536, got 2.0"),
        ({"num_cpus": 0}, "num_cpus must be a number > 0"),
        ({"max_concurrent_batches": 0}, "max_concurrent_batches must be an integer from 1 to"),
    ]:
        with pytest.raises(InvalidParameterError, match=message.replace("(", r"\(")):
            ProcessorConfig(**options)  # type: ignore[arg-type]  # a dict of several types
    predictors: list[tuple[dict[str, Any], str]] = [
        ({"task_type": "draw"}, "task_type must be one of"),
        ({"sampling_params": {"warmth": 1}}, "sampling_params.warmth is not supported, got 1"),
        ({"pooling_params": {"size": 8}}, "pooling_params.size is not supported, got 8; PoolingParams has no such"),
    ]
    for arguments, message in predictors:
        with pytest.raises(InvalidParameterError, match=message):
            LLMPredictor(**arguments)


@pytest.mark.parametrize(
    ("missing", "requirement"), [("ray", "Ray"), ("pyarrow", "Ray with its extra data")], ids=["ray", "pyarrow"]
)
def test_import_without_ray(missing: str, requirement: str) -> None:
    program = f"""
import sys
sys.modules["{missing}"] = None
import ferrule
assert ferrule.LLM and ferrule.AsyncLLM
try:
    import ferrule.ray
except ferrule.MissingDependencyError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"ferrule.ray requires {requirement}: pip install 'ferrule[ray]'\n"


def rows_by_number(dataset: Any) -> list[dict[str, Any]]:
    return sorted(dataset.take_all(), key=lambda row: row["number"])


@pytest.fixture(scope="module")
def expected() -> Iterator[list[str]]:
    """Answers of `LLM.generate` to CAPITALS."""
    with LLM() as llm:
        yield [output.outputs[0].text for output in llm.generate(CAPITALS, PARAMS)]


@pytest.mark.native
@pytest.mark.usefixtures("ray_driver")
def test_two_actors_give_the_output_of_generate(tmp_path: Path, expected: list[str]) -> None:
    class Recorded(LLMPredictor):
        async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            (tmp_path / str(os.getpid())).touch()
            deadline = time.monotonic() + 300
            while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:  # until both actors have rows
                await asyncio.sleep(0.05)
            columns = await super().__call__(batch)
            facts = self._llm.info()
            count = len(batch["number"])
            return {**columns, "process": [os.getpid()] * count, "threads": [facts["threads"]] * count}

    numbered = [{"number": number, "prompt": prompt} for number, prompt in enumerate(CAPITALS * 20)]
    dataset = ray.data.from_items(numbered, override_num_blocks=12).map_batches(
        Recorded,
        fn_constructor_kwargs={"sampling_params": GREEDY},
        num_cpus=1,
        concurrency=2,
        batch_size=4,
    )
    rows = rows_by_number(dataset)
    assert [row["number"] for row in rows] == list(range(120))
    assert [row["generated_text"] for row in rows] == expected * 20
    assert {row["error"] for row in rows} == {None}
    assert {row["threads"] for row in rows} == {1}
    assert len({row["process"] for row in rows}) == 2


@pytest.mark.native
@pytest.mark.usefixtures("ray_driver")
def test_killed_actor_loses_and_repeats_no_row(tmp_path: Path, expected: list[str]) -> None:
    killed = tmp_path / "killed"

    class Killed(LLMPredictor):
        async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            columns = await super().__call__(batch)
            if 50 in batch["number"] and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return columns

    numbered = [{"number": number, "prompt": prompt} for number, prompt in enumerate(CAPITALS * 20)]
    dataset = ray.data.from_items(numbered, override_num_blocks=12).map_batches(
        Killed, fn_constructor_kwargs={"sampling_params": GREEDY}, num_cpus=1, concurrency=2, batch_size=4
    )
    rows = rows_by_number(dataset)
    assert killed.exists()
    assert [row["number"] for row in rows] == list(range(120))
    assert [row["generated_text"] for row in rows] == expected * 20


@pytest.mark.native
@pytest.mark.usefixtures("ray_driver")
def test_processor_converts_rows_and_keeps_invalid_ones(expected: list[str]) -> None:
    config = ProcessorConfig(engine_kwargs={"sampling_params": GREEDY}, batch_size=2)
    processor = build_processor(
        config,
        preprocess=lambda row: {"prompt": f"The capital of {row['country']} is", "sampling_params": row["params"]},
        postprocess=lambda row: {"number": row["number"], "text": row["generated_text"], "error": row["error"]},
    )
    countries = [
        {"number": 0, "country": "France", "params": {"max_tokens": 8}},
        {"number": 1, "country": "Japan", "params": {"temperature": -1.0}},
        {"number": 2, "country": "Italy", "params": None},
    ]
    rows = rows_by_number(processor(ray.data.from_items(countries)))
    assert [row["text"] for row in rows] == [expected[0], None, expected[2]]
    assert rows[1]["error"] == "InvalidParameterError: temperature must be a number from 0 to 100, got -1"
    assert list(rows[0]) == ["number", "text", "error"]


@pytest.mark.native
@pytest.mark.usefixtures("ray_driver")
def test_messages_and_logprobs_pass_through_arrow() -> None:
    conversations = [
        [{"role": "user", "content": "What is the capital of France?"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of Japan?"}],
    ]
    items = [
        {"number": 0, "messages": conversations[0], "sampling_params": {**GREEDY, "logprobs": 1}},
        {"number": 1, "messages": conversations[1], "sampling_params": GREEDY},
    ]
    rows = rows_by_number(build_processor(ProcessorConfig())(ray.data.from_items(items)))
    with LLM() as llm:
        outputs = llm.chat(conversations, PARAMS.clone(logprobs=1))
    assert [row["generated_text"] for row in rows] == [output.outputs[0].text for output in outputs]
    first = next(iter((outputs[0].outputs[0].logprobs or [])[0].items()))
    assert rows[0]["logprobs"][0][0]["token_id"] == first[0]
    assert rows[0]["logprobs"][0][0]["logprob"] == first[1].logprob
    assert rows[1]["logprobs"] is None


VISION = Path(__file__).parents[1] / "golden/vision/smolvlm"
IMAGE_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


@pytest.mark.native
@pytest.mark.usefixtures("ray_driver")
@pytest.mark.parametrize("arrays", [False, True], ids=["bytes", "arrays"])
def test_images_pass_through_arrow(arrays: bool) -> None:
    files = [VISION / f"image{index}.png" for index in (0, 1, 1)]
    given: list[Any] = [np.asarray(read_image(file, "image")) if arrays else file.read_bytes() for file in files]
    content = [{"type": "image"}, {"type": "text", "text": "Which is round?"}]
    items = [
        {"number": 0, "prompt": "<image>Which is round?", "image": given[0]},
        {"number": 1, "messages": [{"role": "user", "content": content}], "image": given[1]},
        {"number": 2, "prompt": "None is here.", "image": given[2]},
        {"number": 3, "messages": [{"role": "user", "content": [*content, content[0]]}], "image": given[2]},
    ]
    options = {"quantization": "f32", "sampling_params": {**GREEDY, "ignore_eos": True}}
    config = ProcessorConfig(model_source=str(VISION), engine_kwargs=options, chat_template=IMAGE_TEMPLATE)
    rows = rows_by_number(build_processor(config)(ray.data.from_items(items)))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(VISION, quantization="f32") as llm:
        prompts: list[Any] = [
            {"prompt": "<image>Which is round?", "multi_modal_data": {"image": file}} for file in files[:2]
        ]
        outputs = llm.generate(prompts, params)
    assert [rows[number]["error"] for number in (0, 1)] == [None, None]
    assert [list(rows[number]["generated_tokens"]) for number in (0, 1)] == [
        list(output.outputs[0].token_ids) for output in outputs
    ]
    assert rows[0]["generated_tokens"] != rows[1]["generated_tokens"]
    assert rows[2]["error"].startswith("PromptError: the prompt must have one placeholder <image>")
    assert rows[3]["error"].startswith("InvalidParameterError: image must be 2 images")


@pytest.mark.native
@pytest.mark.usefixtures("ray_driver")
def test_embeddings_pass_through_arrow() -> None:
    items = [{"number": number, "prompt": prompt} for number, prompt in enumerate([*CAPITALS, None])]
    config = ProcessorConfig(task_type="embed", engine_kwargs={"pooling_params": {"dimensions": 16}})
    rows = rows_by_number(build_processor(config)(ray.data.from_items(items)))
    with LLM() as llm:
        embeddings = [output.outputs.embedding[:16] for output in llm.embed(CAPITALS)]
    assert rows[-1]["embeddings"] is None
    assert rows[-1]["error"].startswith("InvalidParameterError: prompt must be a string in each row")
    for row, embedding in zip(rows[:-1], embeddings, strict=True):
        np.testing.assert_allclose(row["embeddings"], embedding / np.linalg.norm(embedding), rtol=1e-5)


@pytest.mark.native
@pytest.mark.usefixtures("ray_driver")
def test_labels_and_probabilities_pass_through_arrow(tmp_path: Path) -> None:
    model = tmp_path / "classifier"
    shutil.copytree(CLASSIFIER, model, copy_function=shutil.copyfile)
    write_word_tokenizer(model)
    texts = ["w10 w11", "w12 w13 w14", "w200"]
    items = [{"number": number, "prompt": text} for number, text in enumerate([*texts, None])]
    dataset = ray.data.from_items(items).map_batches(
        LLMPredictor,
        fn_constructor_kwargs={"model": str(model), "task_type": "classify"},
        num_cpus=1,
        concurrency=1,
    )
    rows = rows_by_number(dataset)
    with LLM(model) as llm:
        outputs = llm.classify(texts)
    assert [row["label"] for row in rows] == [*(output.outputs.label for output in outputs), None]
    assert [list(row["probs"]) for row in rows[:-1]] == [list(output.outputs.probs) for output in outputs]
    assert rows[-1]["probs"] is None
    assert rows[-1]["error"].startswith("InvalidParameterError: prompt must be a string in each row")


@pytest.mark.native
@pytest.mark.usefixtures("ray_driver")
def test_structured_output_passes_through_arrow() -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
    }
    structure = {"json": json.dumps(schema), "disable_any_whitespace": True}
    sampled: dict[str, Any] = {"temperature": 1.0, "max_tokens": 128, "structured_outputs": structure}
    items = [
        {"number": seed, "prompt": CAPITALS[seed], "sampling_params": {**sampled, "seed": seed} if seed else None}
        for seed in range(3)
    ]
    dataset = ray.data.from_items(items).map_batches(
        LLMPredictor, fn_constructor_kwargs={"sampling_params": GREEDY}, num_cpus=1, concurrency=1
    )
    rows = rows_by_number(dataset)
    sampled["structured_outputs"] = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    with LLM() as llm:
        outputs = llm.generate(CAPITALS[:3], [PARAMS, *(SamplingParams(**sampled, seed=seed) for seed in (1, 2))])
    assert [row["error"] for row in rows] == [None] * 3
    assert [row["generated_text"] for row in rows] == [output.outputs[0].text for output in outputs]
    for row in rows[1:]:
        assert set(json.loads(row["generated_text"])) == {"name", "age"}


@pytest.mark.native
def test_scores() -> None:
    rows = run({"data_1": [CAPITALS[0]] * len(CAPITALS), "data_2": CAPITALS}, task_type="score")
    with LLM() as llm:
        assert [row["score"] for row in rows] == [output.outputs.score for output in llm.score(CAPITALS[0], CAPITALS)]


@pytest.mark.usefixtures("ray_driver")
def test_model_that_cannot_be_loaded_ends_the_job(tmp_path: Path) -> None:
    dataset = ray.data.from_items([{"prompt": "A cat"}])
    config = ProcessorConfig(model_source=str(tmp_path / "nothing"))
    with pytest.raises(Exception, match="nothing"):  # Ray's error has the message of the actor's
        build_processor(config)(dataset).take_all()


@pytest.mark.native
@pytest.mark.parametrize("dynamic", [False, True])
def test_column_model_selects_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> None:
    adapter = random_adapter(tmp_path / "adapters" / "polite", TINY, alpha=64)
    monkeypatch.chdir(tmp_path)
    options = {"dynamic_lora_loading_path": "adapters"} if dynamic else {"lora_modules": {"polite": adapter}}
    models = [None, "polite", "tiny", "unknown"]
    rows = run({"prompt": [CAPITALS[0]] * 4, "model": models}, sampling_params=GREEDY, **options)
    with LLM(lora_modules={"polite": adapter}) as llm:
        base, adapted = (
            llm.generate(CAPITALS[0], PARAMS, lora_request=name)[0].outputs[0].token_ids for name in (None, "polite")
        )
    assert base != adapted
    assert [row["generated_tokens"] for row in rows] == [base, adapted, base, None]
    assert rows[3]["error"].startswith("ModelNotFoundError: " if dynamic else "InvalidParameterError: ")
    assert not dynamic or str(tmp_path / "adapters" / "unknown") in rows[3]["error"]  # not a repository of the hub


def test_name_of_an_adapter_is_not_a_path(fake_engine: type[fakes.Engine]) -> None:
    names = ["../x", "..", ".", "", "/x", "org/repo", "..\\x"]
    rows = run({"prompt": ["A cat"] * len(names), "model": names}, dynamic_lora_loading_path="adapters")
    expected = "InvalidParameterError: model must be tiny or the name of a directory in adapters, got "
    assert [row["error"] for row in rows] == [f"{expected}{name!r}" for name in names]


@pytest.mark.native
def test_example(ray_cluster: str) -> None:
    program = Path(__file__).parents[2] / "examples" / "ray_batch.py"
    done = subprocess.run(
        [sys.executable, program],
        env={**os.environ, "RAY_ADDRESS": ray_cluster},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "The capital of France is Paris.",
        "The capital of Japan is Tokyo.",
        "InvalidParameterError: max_tokens must be an integer from 1 to 2147483647, got -1",
    ]
