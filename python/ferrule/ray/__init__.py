"""Inference on several machines with Ray (https://docs.ray.io).

It needs `pip install ferrule[ray]`.

    import ray
    from ferrule.ray import LLMPredictor

    prompts = ray.data.read_parquet("prompts.parquet")
    prompts.map_batches(LLMPredictor, num_cpus=8, concurrency=4, batch_size=256).write_parquet("answers")

`predictor` and `processor` run the rows of datasets, `batch_workers` the lines of `ferrule run-batch --ray`. Each actor
has a separate engine; actors of one host map the same file of packed weights.

Raises MissingDependencyError if Ray or pyarrow, which Ray Data needs, is not installed.
"""

from importlib.util import find_spec

from ferrule.errors import MissingDependencyError

if find_spec("ray") is None:
    raise MissingDependencyError("ferrule.ray requires Ray: pip install 'ferrule[ray]'")
if find_spec("pyarrow") is None:
    raise MissingDependencyError("ferrule.ray requires Ray with its extra data: pip install 'ferrule[ray]'")

from ferrule.ray.predictor import LLMPredictor
from ferrule.ray.processor import ProcessorConfig, build_processor

__all__ = ["LLMPredictor", "ProcessorConfig", "build_processor"]
