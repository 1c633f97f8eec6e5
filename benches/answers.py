#!/usr/bin/env python
"""Count how the answers of an instruct model end with the default sampling of `ferrule run` and `ferrule chat`.

Asks twenty questions with each seed, each in a new conversation, and prints a JSON object: the number of answers, of
empty ones, of those that end at the default limit of tokens, and of those that the guard against endless loops ends.

    python benches/answers.py smollm2:135m --seeds 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from ferrule import LLM, SamplingParams
from ferrule._cli.chat.answers import LocalAnswers

QUESTIONS = (
    "Why is the sky blue?",
    "What is the capital of France?",
    "How do I boil an egg?",
    "Write a haiku about autumn.",
    "What is the difference between a list and a tuple in Python?",
    "Explain photosynthesis to a child.",
    "Give me three ideas for a birthday present.",
    "Who wrote Romeo and Juliet?",
    "How many legs does a spider have?",
    "Translate 'good morning' to Spanish.",
    "What should I cook with rice and tomatoes?",
    "Write a short email that thanks a colleague.",
    "What causes the tides?",
    "Name five animals that live in the sea.",
    "How can I sleep better?",
    "What is 12 plus 30?",
    "Tell me a joke.",
    "Summarize in one sentence what a computer does.",
    "What is the largest planet?",
    "Why should I learn to read music?",
)


@dataclass(frozen=True)
class Answer:
    """An answer to a question."""

    question: str
    seed: int
    text: str
    end: str
    """`stop`, `limit` (the default number of tokens), `loop` (the guard), or `length` (the context)."""


def answers(llm: LLM, questions: Sequence[str], seeds: int) -> list[Answer]:
    """Asks questions with each seed, with the default sampling; as many are answered at once as there are questions."""
    source = LocalAnswers(llm)

    def answer(seed: int, question: str) -> Answer:
        text, notice, output = "", "", None
        params = SamplingParams.with_model_defaults(seed=seed)
        for delta in source.stream([{"role": "user", "content": question}], params):
            text, notice, output = text + delta.content, delta.notice or notice, delta.output or output
        end = "loop" if output is None else "limit" if notice else str(output.outputs[0].finish_reason)
        return Answer(question, seed, text, end)

    with ThreadPoolExecutor(len(questions)) as pool:
        return list(pool.map(answer, *zip(*product(range(seeds), questions), strict=True)))


def counts(found: list[Answer]) -> dict[str, Any]:
    """Returns the number of answers, in all and by their ends."""
    ends = [answer.end for answer in found]
    return {
        "answers": len(found),
        "empty": sum(not answer.text.strip() for answer in found),
        **{end: ends.count(end) for end in ("stop", "limit", "loop", "length")},
        "median_characters": statistics.median(len(answer.text) for answer in found),
    }


def main() -> None:
    """Runs the questions and prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Instruct model.")
    parser.add_argument("--seeds", type=int, default=1, help="Number of seeds (default 1).")
    parser.add_argument(
        "--questions", type=int, default=len(QUESTIONS), help=f"Number of questions (default {len(QUESTIONS)})."
    )
    parser.add_argument("--texts", action="store_true", help="Print the answers too.")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    with LLM(arguments.model) as llm:
        found = answers(llm, QUESTIONS[: arguments.questions], arguments.seeds)
    report = {"model": arguments.model, **counts(found), "seconds": round(time.perf_counter() - begin, 1)}
    if arguments.texts:
        report["texts"] = [asdict(answer) for answer in found]
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
