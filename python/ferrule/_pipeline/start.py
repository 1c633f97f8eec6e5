"""Starts the pipeline stages that the arguments of an engine ask for."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ferrule._loading import ModelFiles
from ferrule._params.options import EngineArgs

if TYPE_CHECKING:
    from ferrule._pipeline.stages import Stages


def start_stages(args: EngineArgs, files: ModelFiles, weights: Path | None) -> Stages | None:
    """Starts the pipeline stages and waits until they have loaded their layers; None for a model in one process.

    `weights` is the path that each stage loads; None for random weights.

    Raises InvalidParameterError if the model cannot be divided into so many stages, and the errors of loading a model.
    """
    count = args.pipeline_parallel_size
    if count == 1:
        return None
    from ferrule import _native
    from ferrule._pipeline.processes import StageProcesses
    from ferrule._pipeline.stages import StageArguments

    spec, path = files.spec.to_json(), None if weights is None else os.fspath(weights)
    layers = _native.divide_layers(spec, path, args.to_json(), count)
    threads = args.threads or max(_native.cpu_count() // count, 1)
    options = replace(args, threads=threads).to_json()
    stages = StageProcesses(
        [StageArguments(spec=spec, weights=path, options=options, layers=each, sharers=count) for each in layers],
        threads,
    )
    try:
        stages.wait_until_loaded()
    except BaseException:
        stages.close()
        raise
    return stages
