"""How much sooner an output is there whose tokens are predicted, by how many of the predictions come true.

A model in a well-known shape writes a continuation; then it writes the same one again and again, with its own output as
the `prediction`, in which a seeded coin has made some tokens wrong: so drafts are accepted with a known probability. Runs
with and without prediction take turns. What is shown is the decode speed, and its ratio to that without prediction.

    python benches/speculation.py --shape llama-1b --quantization int4
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys

from ferrule import LLM, RequestOutput, SamplingParams
from ferrule.shapes import shape_names


def corrupted(tokens: list[int], accept: float, vocab_size: int, seed: int) -> list[int]:
    """Each token, or with the probability `1 - accept` another."""
    coin = random.Random(seed)
    return [token if coin.random() < accept else (token + 1 + coin.randrange(vocab_size - 1)) % vocab_size for token in tokens]


def decode_seconds(output: RequestOutput) -> float:
    """From the first token to the last."""
    if output.metrics.decode_time is None:
        raise SystemExit("a request ended without a token")
    return output.metrics.decode_time


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=shape_names(), default="llama-1b")
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--context", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--gen", type=int, default=256, help="tokens to write")
    parser.add_argument("--accept", default="1,0.8,0.5,0", help="probabilities that a predicted token comes true")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeat", type=int, default=5)
    given = parser.parse_args()

    shares = [float(word) for word in given.accept.split(",")]
    with LLM.from_shape(given.shape, quantization=given.quantization) as llm:
        vocab_size = int(llm.info()["vocab_size"])
        numbers = random.Random(1)
        prompt = {"prompt_token_ids": [numbers.randrange(vocab_size) for _ in range(given.context)]}
        plain = SamplingParams(temperature=given.temperature, seed=1, max_tokens=given.gen, ignore_eos=True)

        def run(prediction: list[int] | None) -> RequestOutput:
            return llm.generate(prompt, SamplingParams(**{**plain.given(), "prediction": prediction}))[0]

        expected = run(None).outputs[0].token_ids
        seconds: dict[float | None, list[float]] = {share: [] for share in (None, *shares)}
        drafts: dict[float, list[tuple[int, int]]] = {share: [] for share in shares}
        for number in range(given.repeat):
            for share in seconds:
                prediction = None if share is None else corrupted(expected, share, vocab_size, number)
                output = run(prediction)
                if output.outputs[0].token_ids != expected:
                    sys.exit(f"with {share} of the predictions right, other tokens came out")
                seconds[share].append(decode_seconds(output))
                if share is not None:
                    drafts[share].append((output.metrics.drafted_tokens, output.metrics.accepted_tokens))
    base = seconds[None]
    print(f"{given.shape}  {given.quantization}, {given.context} tokens and {given.gen} to write, median of {given.repeat} runs\n")
    print("accept   tok/s   ratio    best  drafted  accepted")
    print(f"  none {(given.gen - 1) / statistics.median(base):7.1f}    1.00")
    for share in shares:
        ratios = [without / with_drafts for without, with_drafts in zip(base, seconds[share], strict=True)]
        drafted, accepted = (statistics.median(each) for each in zip(*drafts[share], strict=True))
        rate = (given.gen - 1) / statistics.median(seconds[share])
        print(f"{share:6.2f} {rate:7.1f} {statistics.median(ratios):7.2f} {max(ratios):7.2f} {drafted:8.0f} {accepted:9.0f}")


if __name__ == "__main__":
    main()
