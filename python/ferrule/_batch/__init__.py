"""Files of requests in OpenAI's batch format (https://platform.openai.com/docs/guides/batch).

Each line is a request to the server application, which runs in this process without a network. Responses and errors are
therefore the same as with `ferrule serve`. Responses are written in the order of the requests. An interrupted run is
resumed by reading both files in parallel, so that memory does not grow with their size.
"""

from ferrule._batch.files import Answered, BatchInput, BatchOutput
from ferrule._batch.requests import check_model_names
from ferrule._batch.runner import Progress, run_batch

__all__ = ["Answered", "BatchInput", "BatchOutput", "Progress", "check_model_names", "run_batch"]
