#!/usr/bin/env python3
"""Measure the speed of predicted output by its acceptance rate.

A model in a well-known shape generates a continuation. It then generates the same continuation repeatedly, with its own
output as the `prediction`, in which some random tokens are wrong, so that drafts are accepted with a known probability.
Runs with and without prediction alternate. The output is the decode speed, and its ratio to the speed without
prediction.

    python benches/speculation.py --shape llama-1b --quantization int4
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from dataclasses import replace

from ferrule import LLM, RequestMetrics, SamplingParams
from ferrule._loading.shapes import shape_names
from ferrule._text.prompt import TokensPrompt


def corrupted(tokens: list[int], accept: float, vocab_size: int, seed: int) -> list[int]:
    """Replaces each token by another one with the probability `1 - accept`."""
    coin = random.Random(seed)
    return [
        token if coin.random() < accept else (token + 1 + coin.randrange(vocab_size - 1)) % vocab_size
        for token in tokens
    ]


def seconds(runs: list[RequestMetrics]) -> float:
    """Returns the median decode time, from the first token to the last."""
    return statistics.median(run.decode_time or 0 for run in runs)


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=shape_names(), default="llama-1b")
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--context", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--gen", type=int, default=256, help="tokens to write")
    parser.add_argument("--accept", default="1,0.8,0.5,0", help="probabilities that a predicted token is right")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeat", type=int, default=5)
    given = parser.parse_args()

    shares = [float(word) for word in given.accept.split(",")]
    with LLM.from_shape(given.shape, quantization=given.quantization) as llm:
        vocab_size = int(llm.info()["vocab_size"])
        prompt: TokensPrompt = {"prompt_token_ids": random.Random(1).choices(range(vocab_size), k=given.context)}
        plain = SamplingParams(temperature=given.temperature, seed=1, max_tokens=given.gen, ignore_eos=True)
        expected = llm.generate(prompt, plain)[0].outputs[0].token_ids
        base: list[RequestMetrics] = []
        predicted: dict[float, list[RequestMetrics]] = {share: [] for share in shares}
        for number in range(given.repeat):
            base.append(llm.generate(prompt, plain)[0].metrics)
            for share, runs in predicted.items():
                prediction = corrupted(expected, share, vocab_size, number)
                output = llm.generate(prompt, replace(plain, prediction=prediction))[0]
                if output.outputs[0].token_ids != expected:
                    sys.exit(f"with {share} of the predictions right, other tokens came out")
                runs.append(output.metrics)

    print(f"{given.shape}  {given.quantization}, {given.context} tokens and {given.gen} to write", end="")
    print(f", median of {given.repeat} runs\n")
    print("accept   tok/s   ratio    best  drafted  accepted")
    print(f"  none {(given.gen - 1) / seconds(base):7.1f}    1.00")
    for share, runs in predicted.items():
        ratios = [seconds([without]) / seconds([run]) for without, run in zip(base, runs, strict=True)]
        drafted = statistics.median(run.drafted_tokens for run in runs)
        accepted = statistics.median(run.accepted_tokens for run in runs)
        rate = (given.gen - 1) / seconds(runs)
        row = f"{share:6.2f} {rate:7.1f} {statistics.median(ratios):7.2f} {max(ratios):7.2f}"
        print(f"{row} {drafted:8.0f} {accepted:9.0f}")


if __name__ == "__main__":
    main()
