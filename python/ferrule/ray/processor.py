"""`build_processor`: a model for the rows of a dataset, with the names of `ray.data.llm`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import ray.data

from ferrule._params.options import MAX_THREADS
from ferrule._validation import check_choice, check_integer, check_number
from ferrule.errors import InvalidParameterError
from ferrule.ray.predictor import LLMPredictor
from ferrule.ray.tasks import TASKS

MAX_ROWS = 1 << 20
MAX_ACTORS = 1 << 16
CONVERSION = {"num_cpus": 0}
"""Resources of the tasks that convert rows. With a CPU they would wait forever if the actors have all of them."""
Convert: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]
"""Function of a row that returns columns."""
Processor: TypeAlias = Callable[[ray.data.Dataset], ray.data.Dataset]
"""Function that returns a dataset with the output columns."""


@dataclass(frozen=True, kw_only=True)
class ProcessorConfig:
    """Configuration of `build_processor`, with the names of Ray's `vLLMEngineProcessorConfig`.

    Raises InvalidParameterError for an invalid value.
    """

    model_source: str | None = None
    """Model to load, as in LLM; None for the model that ships with ferrule."""
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of LLMPredictor, such as `quantization`, `max_model_len` and `sampling_params`."""
    task_type: str = "generate"
    """`generate`, `embed`, `classify` or `score`."""
    batch_size: int = 32
    """Number of rows in a batch."""
    max_concurrent_batches: int = 8
    """Number of tasks that an actor runs at once, so that its engine computes rows of several blocks together."""
    concurrency: int | tuple[int, int] = 1
    """Number of actors, or their minimum and maximum."""
    num_cpus: float = 1
    """CPUs of each actor, which are the threads of its engine."""
    chat_template: str | None = None
    """Chat template, as in `LLM.chat`; None for the model's."""
    dynamic_lora_loading_path: str | None = None
    """Directory of adapters that the column `model` names."""

    def __post_init__(self) -> None:
        check_choice("task_type", self.task_type, tuple(TASKS))
        check_integer("batch_size", self.batch_size, 1, MAX_ROWS)
        check_integer("max_concurrent_batches", self.max_concurrent_batches, 1, MAX_ROWS)
        check_number("num_cpus", self.num_cpus, 0, MAX_THREADS, above_low=True)
        numbers = self.concurrency if isinstance(self.concurrency, tuple) else (self.concurrency,)
        for number in numbers:
            check_integer("concurrency", number, 1, MAX_ACTORS)
        if isinstance(self.concurrency, tuple) and (len(numbers) != 2 or numbers[0] > numbers[1]):
            requirement = f"a number of actors, or a minimum and a maximum from 1 to {MAX_ACTORS}"
            raise InvalidParameterError("concurrency", self.concurrency, requirement)


def build_processor(
    config: ProcessorConfig,
    preprocess: Convert | None = None,
    postprocess: Convert | None = None,
    *,
    preprocess_map_kwargs: Mapping[str, Any] | None = None,
    postprocess_map_kwargs: Mapping[str, Any] | None = None,
) -> Processor:
    """Returns a function that adds the output of a model to a dataset, as `ray.data.llm.build_processor` does.

        config = ProcessorConfig(model_source="org/repo", num_cpus=8, concurrency=4)
        processor = build_processor(
            config,
            preprocess=lambda row: {"messages": [{"role": "user", "content": row["question"]}]},
            postprocess=lambda row: {"question": row["question"], "answer": row["generated_text"]},
        )
        answers = processor(questions)

    `preprocess` returns the columns that LLMPredictor reads; they are added to the row. `postprocess` returns the
    columns of the result; without it the result has all columns. The last two arguments are passed to `Dataset.map` of
    these functions, whose tasks otherwise reserve no CPU.
    """
    (low, high) = config.concurrency if isinstance(config.concurrency, tuple) else (config.concurrency,) * 2

    def process(dataset: ray.data.Dataset) -> ray.data.Dataset:
        rows: Any = dataset  # Ray's methods are partly without types
        if preprocess is not None:
            rows = rows.map(_adding(preprocess), **{**CONVERSION, **(preprocess_map_kwargs or {})})
        rows = rows.map_batches(
            LLMPredictor,
            fn_constructor_kwargs={
                "model": config.model_source,
                "task_type": config.task_type,
                "chat_template": config.chat_template,
                "dynamic_lora_loading_path": config.dynamic_lora_loading_path,
                **config.engine_kwargs,
            },
            batch_size=config.batch_size,
            compute=ray.data.ActorPoolStrategy(
                min_size=low,
                max_size=high,
                max_tasks_in_flight_per_actor=2 * config.max_concurrent_batches,
                max_concurrent_calls_per_actor=config.max_concurrent_batches,
            ),
            num_cpus=config.num_cpus,
        )
        return (
            rows if postprocess is None else rows.map(postprocess, **{**CONVERSION, **(postprocess_map_kwargs or {})})
        )

    return process


def _adding(convert: Convert) -> Convert:
    """Returns a function that adds the columns of another one to a row."""
    return lambda row: {**row, **convert(row)}
