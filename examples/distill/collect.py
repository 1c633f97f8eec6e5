"""Distillation, step 1: writes a teacher's text and its most probable tokens after each token to a directory.

    python examples/distill/collect.py [TEACHER] --out target/distill/data [--text FILE]

The teacher samples its training text itself, or reads FILE. A second pass over the finished text computes the
log-probabilities: like a prompt, it takes a fraction of the time of sampling, and it returns arrays.
"""

import argparse
import sys
from pathlib import Path

from ferrule import LLM, FerruleError, SamplingParams


def sample(llm: LLM, count: int, length: int, seed: int) -> list[list[int]]:
    """Samples texts of `length` tokens from nothing but the token that begins a text.

    They go on after the end of a document, as windows of training data do.
    """
    first = llm.get_tokenizer().bos_token_id
    if first is None:
        raise SystemExit("collect.py: TEACHER has no token that begins a text: give a text with --text")
    params = [
        SamplingParams(temperature=1, max_tokens=length - 1, ignore_eos=True, detokenize=False, seed=seed + number)
        for number in range(count)
    ]
    outputs = llm.generate([{"prompt_token_ids": [first]} for _ in params], params)
    return [[first, *output.outputs[0].token_ids] for output in outputs]


def windows(llm: LLM, text: str, count: int, length: int) -> list[list[int]]:
    """Cuts a text into at most `count` texts of `length` tokens, and drops a shorter rest."""
    tokenizer = llm.get_tokenizer()
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    size = length - len(first)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    starts = range(0, len(token_ids) - size + 1, size)
    if not starts:
        raise SystemExit(f"collect.py: --text must have at least {size} tokens (--length), got {len(token_ids)}")
    return [[*first, *token_ids[start : start + size]] for start in starts[:count]]


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description="Write text and a teacher's most probable tokens for distillation.")
    parser.add_argument("teacher", nargs="?", help="path or name of a model (default: the embedded model)")
    parser.add_argument("--out", type=Path, required=True, help="new directory for the training data")
    parser.add_argument("--text", type=Path, help="UTF-8 text to read (default: the teacher samples its text)")
    parser.add_argument("--texts", type=int, default=500, help="maximum number of texts (default: %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="tokens of each text (default: %(default)s)")
    parser.add_argument("-k", type=int, default=16, help="most probable tokens to store (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first text (default: %(default)s)")
    parser.add_argument("--quantization", default="f32", help="weight format of the teacher (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    """Collects the texts, and exports the teacher's log-probabilities."""
    args = arguments()
    if args.texts < 1:
        raise SystemExit(f"collect.py: --texts must be >= 1, got {args.texts}")
    if args.out.exists() and any(args.out.iterdir()):
        raise SystemExit(f"collect.py: --out must be a new directory, but {args.out} is not empty")
    with LLM(args.teacher, quantization=args.quantization) as llm:
        info = llm.info()
        vocabulary, context = info["vocab_size"], info["max_model_len"]
        if not info["tokenizer"]:
            raise SystemExit(f"collect.py: TEACHER must have a tokenizer, {info['directory']} has no tokenizer.json")
        if not 2 <= args.length <= context:
            raise SystemExit(f"collect.py: --length must be from 2 to {context} (the context), got {args.length}")
        if not 1 <= args.k <= vocabulary:
            raise SystemExit(f"collect.py: -k must be from 1 to {vocabulary} (the vocabulary), got {args.k}")
        if args.text is None:
            texts = sample(llm, args.texts, args.length, args.seed)
        else:
            texts = windows(llm, args.text.read_text(encoding="utf-8"), args.texts, args.length)
        llm.export_top_logprobs([{"prompt_token_ids": ids} for ids in texts], args.k, args.out)
    size = sum(file.stat().st_size for file in args.out.iterdir())
    print(f"{args.out}: {len(texts)} texts of {args.length} tokens, {args.k} logprobs each, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    try:
        main()
    except (FerruleError, OSError, UnicodeError) as error:
        sys.exit(f"collect.py: {error}")
