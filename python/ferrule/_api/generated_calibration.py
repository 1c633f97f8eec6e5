"""`generate_calibration`: calibration data that the model itself generates, for quantization without any text."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence

from ferrule._api.llm import LLM
from ferrule._api.quantization import unpacked_files
from ferrule._loading import ModelFiles
from ferrule._params.sampling import SamplingParams
from ferrule._text.prompt import TokensPrompt
from ferrule._text.tokenizer import Tokenizer
from ferrule._validation import check_integer
from ferrule.errors import TokenizerError, UnsupportedTaskError

GENERATED_TOKENS = 16_384
"""Default number of generated tokens."""
LENGTH = 64
"""Length of a sequence in tokens. Many short sequences cover more subjects than a few long ones."""
_AT_ONCE = 64
"""Number of sequences that are generated together."""
_MAX_TOKENS = 1 << 24
_FLAT = 1.0
"""The predictions of a model carry no information if their mean entropy is less than this many nats below that of equal
probabilities, as with random weights."""
_CERTAIN = 0.05
"""Mean entropy in nats below which a model only repeats itself."""


def generate_calibration(
    model: str | os.PathLike[str] | None,
    tokens: int = GENERATED_TOKENS,
    *,
    revision: str | None = None,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """Generates token sequences with a model, as the `calibrate` argument of `allocate_bits` and `quantize`.

    Each sequence has up to 64 tokens: the special tokens of a prompt, a random token, and tokens that are sampled from
    the model at temperature 1, also after an end-of-sequence token. Random first tokens cover all subjects and
    languages of the vocabulary (LLM-QAT, https://arxiv.org/abs/2305.17888). The model runs in int8. The sequences have
    at most `tokens` tokens together, but at least one sequence is generated; on one instruction set they are always the
    same. `progress` is called with the number of generated tokens and their total.

    Raises UnsupportedTaskError for a model that does not generate text, and for one whose text tells nothing about its
    inputs, because it predicts all tokens alike, as with random weights, or always the same ones;
    InvalidParameterError if `tokens` is not from 1 to 2^24 and for a packed model; and the errors of loading one.
    """
    tokens = check_integer("tokens", tokens, 1, _MAX_TOKENS)
    files = unpacked_files(model, revision)
    if not files.spec.generates:
        raise UnsupportedTaskError(f"{files.path} does not generate text for calibration")
    prompts = _prompts(files, tokens)
    length = min(LENGTH, files.spec.max_position_embeddings)
    done, total = 0, sum(max(length - len(prompt), 0) for prompt in prompts)
    sequences: list[list[int]] = []
    entropies: list[float] = []
    # int8 generates almost the text of the exact model; the cache of packed weights keeps it for the next call.
    with LLM(
        model,
        revision=revision,
        quantization="int8",
        threads=threads,
        max_model_len=length,
        max_num_seqs=min(_AT_ONCE, len(prompts)),
        kv_cache_dtype="f32",
    ) as llm:
        for first in range(0, len(prompts), _AT_ONCE):
            portion = prompts[first : first + _AT_ONCE]
            given: list[TokensPrompt] = [{"prompt_token_ids": prompt} for prompt in portion]
            params = [_params(length - len(prompt), first + index) for index, prompt in enumerate(portion)]
            found: list[list[int]] = [[] for _ in portion]
            for index, delta in llm.stream_all(given, params):
                found[index] += delta.token_ids
                done += len(delta.token_ids)
                if delta.output is not None:
                    entropies += delta.output.outputs[0].entropies or []
                if progress is not None:
                    progress(done, total)
            sequences += [prompt + ids for prompt, ids in zip(portion, found, strict=True)]
    _check_entropy(entropies, files)
    return sequences


def _prompts(files: ModelFiles, tokens: int) -> list[list[int]]:
    """Returns the beginnings of the sequences: special tokens of a prompt and a random token."""
    spec = files.spec
    length = min(LENGTH, spec.max_position_embeddings)
    try:
        first = list(Tokenizer(files.path).first_ids)
    except TokenizerError:  # a model without a tokenizer
        first = []
    first = first[: max(length - 2, 0)]
    numbers = random.Random(0)  # reproducible, not secret
    return [[*first, numbers.randrange(spec.vocab_size)] for _ in range(max(tokens // length, 1))]


def _params(tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=1, top_p=1, top_k=0, min_p=0, max_tokens=tokens, seed=seed, ignore_eos=True, entropy=True
    )


def _check_entropy(entropies: Sequence[float], files: ModelFiles) -> None:
    """Raises UnsupportedTaskError if predictions tell nothing about the inputs of a model."""
    mean, most = math.fsum(entropies) / max(len(entropies), 1), math.log(files.spec.vocab_size)
    if not _CERTAIN <= mean <= most - _FLAT:
        raise UnsupportedTaskError(
            f"{files.path} generates no text for calibration: the mean entropy of its predictions is {mean:.2f} nats, "
            f"where {_CERTAIN} to {most - _FLAT:.2f} are expected"
        )
