"""Child process in a peer's environment: loads once, then answers each line with one measurement.

`python serve.py ADAPTER JOB`

Requests and answers are one line of JSON each. The first answer describes the loaded model.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

from adapters.interface import Job, Runner


def main() -> None:
    """Serve until the pipe closes."""
    # Libraries may print to stdout, so answers use a separate descriptor.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job = Job(**json.loads(sys.argv[2]))
    job = replace(job, model=Path(job.model), work=Path(job.work))
    runner: Runner = importlib.import_module(f"adapters.{sys.argv[1]}").load(job)
    print(json.dumps(asdict(runner.loaded)), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(asdict(runner.measure(request["prompts"], request["gen"]))), file=answers)


if __name__ == "__main__":
    main()
