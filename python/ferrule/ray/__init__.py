"""Inference on several machines with Ray (https://docs.ray.io).

It needs `pip install ferrule[ray]`.

    import ray
    from ferrule.ray import LLMPredictor

    prompts = ray.data.read_parquet("prompts.parquet")
    prompts.map_batches(LLMPredictor, num_cpus=8, concurrency=4, batch_size=256).write_parquet("answers")

`predictor` and `processor` run the rows of datasets, `batch_workers` the lines of `ferrule run-batch --ray`, and
`serving` the HTTP server. Each actor has a separate engine; actors of one host map the same file of packed weights.

Raises MissingDependencyError if Ray or pyarrow, which Ray Data needs, is not installed.
Names are imported on first use, so that replicas of a server do not import Ray Data. `__init__.pyi` lists them.
"""

# lazy_loader has no types.
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false

from importlib.util import find_spec

import lazy_loader

from ferrule.errors import MissingDependencyError

if find_spec("ray") is None:
    raise MissingDependencyError("ferrule.ray requires Ray: pip install 'ferrule[ray]'")
if find_spec("pyarrow") is None:
    raise MissingDependencyError("ferrule.ray requires Ray with its extra data: pip install 'ferrule[ray]'")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
