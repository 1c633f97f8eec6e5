"""`LLMPredictor`: a model for the rows of a Ray dataset."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

import ray

from ferrule._api.async_llm import AsyncLLM
from ferrule._loading import EMBEDDED
from ferrule._params.options import worker_count
from ferrule._params.pooling import PoolingParams
from ferrule._params.sampling import MAX_COUNT, SamplingParams
from ferrule._validation import check_choice
from ferrule.errors import EngineError, UnsupportedTaskError
from ferrule.ray.rows import Columns, Row, columns_of, rows_of
from ferrule.ray.tasks import TASKS, Defaults, check_fields


class LLMPredictor:
    """A model for the rows of a dataset: a callable class for `ray.data.Dataset.map_batches`.

        answers = prompts.map_batches(
            LLMPredictor,
            fn_constructor_kwargs={"model": "org/repo", "sampling_params": {"temperature": 0, "max_tokens": 64}},
            num_cpus=8,      # threads of each actor
            concurrency=4,   # number of actors
            batch_size=256,  # rows
        )

    Each actor loads the model once and computes the rows of several batches together (continuous batching). The output
    of a row does not depend on the other rows, on the actor or on the number of actors, unless it is sampled without a
    seed.

    The columns that a row needs, and those that are added to it, depend on `task_type`:

    | `task_type` | reads | adds |
    |---|---|---|
    | `generate` | `prompt`, `tokenized_prompt` (token ids) or `messages`; optionally `image`, `sampling_params`, `model`, `tools`, `chat_template_kwargs` | `generated_text`, `generated_tokens`, `num_generated_tokens`, `num_input_tokens`, `finish_reason`; on request `logprobs`, `prompt_logprobs`, `entropies` |
    | `embed` | `prompt` or `tokenized_prompt` | `embeddings`, `num_input_tokens` |
    | `classify` | `prompt` | `label`, `probs`, `num_input_tokens` |
    | `score` | `data_1`, `data_2` | `score`, `num_input_tokens` |

    `image` is an image or a list of images, for models that read them: arrays uint8 `[height, width, 3]`, encoded bytes,
    or data URLs. They take the places of the model's placeholder in `prompt`, or of `{"type": "image"}` in `messages`,
    which may also have images themselves. `sampling_params` in a row is a dict with fields of SamplingParams. `model` is the name of an adapter, or of the base
    model. Each row also gets the column `error`: None, or the class and message of the error that its values cause; its
    other new columns are then None. Fields of dicts that are None count as missing, because Arrow gives all dicts of a
    column the same fields.
    """  # noqa: E501  # a table

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        task_type: str = "generate",
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        pooling_params: PoolingParams | Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        dynamic_lora_loading_path: str | None = None,
        **engine_kwargs: Any,
    ) -> None:
        """Loads a model.

        `sampling_params` and `pooling_params` apply to all rows; fields that a row sets replace those of
        `sampling_params`. `chat_template` and `chat_template_kwargs` are those of `AsyncLLM.chat`. With
        `dynamic_lora_loading_path`, adapters are loaded at their first use from the directory below it that has their
        name; otherwise they are those of `lora_modules`. `engine_kwargs` are further fields of AsyncEngineArgs;
        `threads` defaults to the CPUs that Ray assigned to the actor, divided by the number of processes of the model.

        Raises InvalidParameterError, and the errors of AsyncLLM.
        """
        self._task = TASKS[check_choice("task_type", task_type, tuple(TASKS))]
        self._defaults = Defaults(
            model=EMBEDDED if model is None else os.fspath(model),
            sampling_params=SamplingParams(**check_fields("sampling_params", sampling_params, SamplingParams))
            if isinstance(sampling_params, Mapping)
            else sampling_params,
            pooling_params=PoolingParams(**check_fields("pooling_params", pooling_params, PoolingParams))
            if isinstance(pooling_params, Mapping)
            else pooling_params,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            dynamic_lora_loading_path=dynamic_lora_loading_path,
        )
        given: dict[str, Any] = {
            "threads": assigned_threads(engine_kwargs),
            "max_queued_requests": MAX_COUNT,
            **engine_kwargs,
        }
        self._llm = AsyncLLM(model, **given)

    async def __call__(self, batch: Columns) -> Columns:
        """Returns the columns of a batch and those of the task.

        Raises EngineError if the engine has failed, UnsupportedTaskError if the model does not support the task, and
        InvalidParameterError for a batch that is not a dict of columns; errors of rows are in the column `error`.
        """
        rows = await asyncio.gather(*map(self._run, rows_of(batch)))
        return {**batch, **columns_of(rows)}

    async def aclose(self) -> None:
        """Closes the engine."""
        await self._llm.aclose()

    async def _run(self, row: Row) -> Row:
        """Returns the new columns of a row."""
        try:
            return {**await self._task.run(self._llm, row, self._defaults), "error": None}
        except UnsupportedTaskError:  # every row would have it
            raise
        except EngineError as error:
            await self._llm.check_health()
            return self._failure(error)
        except Exception as error:
            # Values of a row can have any type, and no row may end the job of the others.
            return self._failure(error)

    def _failure(self, error: Exception) -> Row:
        return {**dict.fromkeys(self._task.columns), "error": f"{type(error).__name__}: {error}"}


def assigned_threads(options: Mapping[str, Any]) -> int | None:
    """Returns the number of threads for the CPUs that Ray assigned to this actor; None outside an actor.

    `options` are arguments of the engine. Several workers divide the CPUs.
    """
    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return None
    cpus: float = ray.get_runtime_context().get_assigned_resources().get("CPU", 0)
    return threads_of_each(cpus, options) if cpus else None


def threads_of_each(cpus: float, options: Mapping[str, Any]) -> int:
    """Returns the number of threads of each worker of an engine with `options` that share `cpus`: at least 1."""
    return max(int(cpus) // worker_count(options), 1)
