"""Batch inference on a Ray cluster: questions of a dataset are answered by actors, and an invalid row gets an error.

    python examples/ray_batch.py [MODEL]

It needs `pip install ferrule[ray]`. Without a cluster (`RAY_ADDRESS`), Ray starts one on this machine.
"""

# Ray's types are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

import sys
from typing import Any

import ray.data

from ferrule.ray import ProcessorConfig, build_processor

QUESTIONS = [
    {"number": 0, "country": "France", "max_tokens": 20},
    {"number": 1, "country": "Japan", "max_tokens": 20},
    {"number": 2, "country": "Italy", "max_tokens": -1},
]


def conversation(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the columns that the model reads."""
    question = f"What is the capital of {row['country']}?"
    return {
        "messages": [{"role": "user", "content": question}],
        "sampling_params": {"temperature": 0, "max_tokens": row["max_tokens"]},
    }


def result(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the columns of the result."""
    return {"number": row["number"], "answer": row["generated_text"], "error": row["error"]}


def main(model: str | None = None) -> None:
    """Answers the questions with two actors of one thread each."""
    config = ProcessorConfig(model_source=model, concurrency=2, num_cpus=1)
    processor = build_processor(config, preprocess=conversation, postprocess=result)
    answers = processor(ray.data.from_items(QUESTIONS)).take_all()
    for row in sorted(answers, key=lambda row: row["number"]):
        print(row["error"] or row["answer"])


if __name__ == "__main__":
    main(*sys.argv[1:2])
