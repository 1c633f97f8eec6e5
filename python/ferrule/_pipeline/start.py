"""Starts the workers of pipeline stages that the arguments of an engine ask for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ferrule._loading import ModelFiles, is_remote
from ferrule._params.options import EngineArgs
from ferrule.errors import InvalidParameterError, MissingDependencyError

if TYPE_CHECKING:
    from ferrule._pipeline.stages import Stages

PANEL_ROWS = 16
"""Rows of a matrix that are packed together and are not divided."""

Layers = Sequence[tuple[int, int]]
"""First layer of each stage, and the one after its last."""


def uses_ray(args: EngineArgs) -> bool:
    """Whether the workers are actors, which pack the weights on their hosts."""
    return args.workers > 1 and args.distributed_executor_backend == "ray"


def start_stages(args: EngineArgs, files: ModelFiles, weights: Path | None) -> Stages | None:
    """Starts the workers and waits until they have loaded their weights; None for a model in one process.

    `weights` is the path that each process of this machine loads; None for random weights.

    Raises InvalidParameterError if the model cannot be divided among so many workers, InsufficientMemoryError if the
    workers of a machine exceed its memory, MissingDependencyError without Ray, EngineError if the Ray cluster cannot
    start them, PipelineStageError, and the errors of loading a model.
    """
    if args.workers == 1:
        return None
    if uses_ray(args) and find_spec("ray") is None:
        raise MissingDependencyError("distributed_executor_backend='ray' requires Ray: pip install 'ferrule[ray]'")
    if args.tensor_parallel_size > (most := max(files.spec.hidden_size // PANEL_ROWS, 1)):
        requirement = f"an integer from 1 to {most} for this model (hidden_size / {PANEL_ROWS})"
        raise InvalidParameterError("tensor_parallel_size", args.tensor_parallel_size, requirement)
    from ferrule import _native

    path = None if weights is None else os.fspath(weights)
    layers = _native.divide_layers(files.spec_json, path, args.to_json(), args.pipeline_parallel_size)
    stages = _start_actors(args, files, layers) if uses_ray(args) else _start_processes(args, files, path, layers)
    try:
        stages.wait_until_loaded()
    except BaseException:
        stages.close()
        raise
    return stages


def _start_processes(args: EngineArgs, files: ModelFiles, weights: str | None, layers: Layers) -> Stages:
    from ferrule import _native
    from ferrule._pipeline.processes import StageProcesses
    from ferrule._pipeline.stages import StageArguments

    ranks = args.tensor_parallel_size
    count = len(layers) * ranks
    threads = args.threads or max(_native.cpu_count() // count, 1)
    spec, options = files.spec_json, replace(args, threads=threads).to_json()
    stages = [(each, (index, len(layers))) for index, each in enumerate(layers)]
    workers = [[each, stage, (rank, ranks)] for each, stage in stages for rank in range(ranks)]
    _native.check_workers_memory(spec, weights, options, workers)
    arguments = [
        StageArguments(spec=spec, weights=weights, options=options, layers=each, stage=stage, rank=rank, sharers=count)
        for each, stage, (rank, _) in workers
    ]
    return StageProcesses(arguments, threads, ranks)


def _start_actors(args: EngineArgs, files: ModelFiles, layers: Layers) -> Stages:
    from ferrule._pipeline.ray_actors import StageActors

    model = None if args.model is None else os.fspath(args.model)
    if model is not None and not is_remote(model):
        model = os.fspath(files.path.absolute())
    return StageActors(args, model, files.spec_json, layers)
