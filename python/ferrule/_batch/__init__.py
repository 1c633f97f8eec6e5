"""Files of requests in OpenAI's batch format (https://platform.openai.com/docs/guides/batch), answered line by line.

Each line goes through the server's own application, without a network: what is answered, and refused, is what
`ferrule serve` would. Answers stand in the order of the requests, so that a run that was broken off is resumed by
reading both files side by side, and memory does not grow with them.
"""

from ferrule._batch.files import Answered, BatchInput, BatchOutput
from ferrule._batch.requests import check_model_names
from ferrule._batch.runner import Progress, run_batch

__all__ = ["Answered", "BatchInput", "BatchOutput", "Progress", "check_model_names", "run_batch"]
