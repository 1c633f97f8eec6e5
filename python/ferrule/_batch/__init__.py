"""Files of requests in OpenAI's batch format (https://platform.openai.com/docs/guides/batch).

Each line is a request to the server's application (ASGI), which runs in this process or in Ray actors without a network
server, so that responses and errors are the same as with `ferrule serve`. Responses are written in the order of the
requests. An interrupted run is resumed by reading both files in parallel, so that memory does not grow with their size.
`ferrule run-batch` and the server's Batch API (`server/batches/`) use it.
"""

from ferrule._batch.files import Answered, BatchInput, BatchOutput
from ferrule._batch.requests import Send, check_model_names, sender
from ferrule._batch.runner import Progress, concurrency, run_batch

__all__ = [
    "Answered",
    "BatchInput",
    "BatchOutput",
    "Progress",
    "Send",
    "check_model_names",
    "concurrency",
    "run_batch",
    "sender",
]
