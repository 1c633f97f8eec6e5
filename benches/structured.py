#!/usr/bin/env python3
"""Measure decode speed with a JSON schema and of free text, in turns.

    python benches/structured.py --shape llama-1b --quantization int4

The vocabulary is synthetic: as many byte strings as the shape has tokens, with realistic lengths. The schema is never
complete, so that all requests have the same length. Prints one JSON object; times are the medians of `--repeat` rounds,
in milliseconds per token.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

from ferrule import LLM, SamplingParams, StructuredOutputsParams, _native
from ferrule._bench.machine import Machine
from ferrule._text.prompt import TokensPrompt

FIRST_TEXT = 256
"""Ids below this number are single bytes."""
SCHEMAS: dict[str, Any] = {
    "strings": {"type": "array", "items": {"type": "string"}, "minItems": 100_000},
    "objects": {
        "type": "array",
        "minItems": 100_000,
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
                "address": {
                    "anyOf": [{"type": "null"}, {"type": "object", "additionalProperties": {"type": "string"}}]
                },
            },
            "required": ["name", "age", "tags", "address"],
            "additionalProperties": False,
        },
    },
}


def made_up_tokens(vocab_size: int) -> list[bytes]:
    """Returns single bytes, then word pieces of 2 to 12 letters, half of them after a space, and pieces of JSON."""
    numbers = random.Random(0)
    letters = "etaoinshrdlucmwfgypbvkjxqz"
    weights = [len(letters) - place for place in range(len(letters))]
    tokens = {bytes([byte]): None for byte in range(FIRST_TEXT)}
    for piece in ('{"', '":', '",', '","', '":"', "[]", "{}", '"]', '"}', "},", "],", ": ", ", ", "  ", "    ", "\n\n"):
        tokens[piece.encode()] = None
    while len(tokens) < vocab_size - 1:
        length = 2 + int(numbers.triangular(0, 10, 2))
        word = "".join(numbers.choices(letters, weights, k=length))
        if numbers.random() < 0.1:
            word = str(numbers.randrange(10**3))
        tokens[((" " if numbers.random() < 0.5 else "") + word).encode()] = None
    return [*tokens, b"<|end|>"]


class MadeUp:
    """A tokenizer that has only the bytes of its tokens."""

    def token_bytes(self, vocab_size: int) -> tuple[list[bytes], set[int]]:
        """Returns the bytes of all tokens and the ids of special tokens."""
        return made_up_tokens(vocab_size), {vocab_size - 1}


def seconds_a_token(llm: LLM, prompts: list[TokensPrompt], params: SamplingParams) -> float:
    """Returns the median decode time per token of concurrent sequences."""
    outputs = llm.generate(prompts, params)
    wanted = params.max_tokens
    if any(len(output.outputs[0].token_ids) != wanted for output in outputs):
        raise SystemExit("a request ended early: the times would not be of the same work")
    return statistics.median(output.metrics.inter_token_latency or 0.0 for output in outputs)


def masks(vocab_size: int, schema: dict[str, Any]) -> dict[str, float]:
    """Measures the seconds to build the vocabulary and to compile a schema."""
    tokens, special = MadeUp().token_bytes(vocab_size)
    begin = time.perf_counter()
    vocabulary = _native.Vocabulary(tokens, special)
    made = time.perf_counter()
    vocabulary.compile(StructuredOutputsParams(json=schema).description())
    return {"vocabulary_seconds": made - begin, "compile_seconds": time.perf_counter() - made}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--gen", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    llm = LLM.from_shape(options.shape, quantization=options.quantization, threads=options.threads, max_model_len=2048)
    llm._grammars._tokenizer = MadeUp()  # type: ignore[assignment]  # pyright: ignore
    vocab_size = llm.info()["vocab_size"]
    numbers = random.Random(1)
    prompts: list[TokensPrompt] = [
        {"prompt_token_ids": numbers.choices(range(vocab_size - 1), k=16)} for _ in range(options.batch)
    ]
    plain = SamplingParams(temperature=1.0, seed=1, max_tokens=options.gen, ignore_eos=True)
    structured = {
        name: SamplingParams(
            temperature=1.0,
            seed=1,
            max_tokens=options.gen,
            ignore_eos=True,
            structured_outputs=StructuredOutputsParams(json=schema),
        )
        for name, schema in SCHEMAS.items()
    }
    machine = Machine(llm.info()["threads"])
    before = machine.measure()
    times: dict[str, list[float]] = {name: [] for name in ("free", *SCHEMAS)}
    for params in (plain, *structured.values()):
        seconds_a_token(llm, prompts, params)
    for _ in range(options.repeat):
        times["free"].append(seconds_a_token(llm, prompts, plain))
        for name, params in structured.items():
            times[name].append(seconds_a_token(llm, prompts, params))
    after = machine.measure()
    ratios = {
        name: statistics.median(free / one for free, one in zip(times["free"], times[name], strict=True))
        for name in SCHEMAS
    }
    metrics = llm.metrics()
    print(
        json.dumps(
            {
                "shape": options.shape,
                "quantization": options.quantization,
                "batch": options.batch,
                "tokens": options.gen,
                "milliseconds_a_token": {name: 1000 * statistics.median(those) for name, those in times.items()},
                "speed_of_free_text": ratios,
                "drafted_tokens": metrics.drafted_tokens,
                "accepted_tokens": metrics.accepted_tokens,
                **masks(vocab_size, SCHEMAS["objects"]),
                "read_gigabytes_per_second": [before.read / 1e9, after.read / 1e9],
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
