"""What a model is and what it needs here, told without loading it."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ferrule._loading import EMBEDDED, ModelFiles, find_model, has_weights, is_repository, read_model_files
from ferrule._loading.gguf import is_gguf
from ferrule._loading.packed_cache import PackedCache
from ferrule._loading.quantized import conversion_words, stored_words
from ferrule._params.options import LOAD_FORMATS, QUANTIZATIONS, EngineOptions
from ferrule._text.tokenizer import Tokenizer
from ferrule._validation import check_choice
from ferrule.archs.spec import Layer, ModelSpec


@dataclass(frozen=True)
class LayerGroup:
    """Layers that are alike."""

    layers: tuple[int, ...]
    """Their indices."""
    layer: Layer


def layer_groups(spec: ModelSpec) -> list[LayerGroup]:
    """The layers of a model by kind, in the order in which each kind first comes."""
    kinds: list[tuple[Layer, list[int]]] = []
    for index, layer in enumerate(spec.layers):
        # Few kinds, but layers may hold long lists: hashing each would cost more than comparing.
        alike = next((layers for kind, layers in kinds if kind is layer or kind == layer), None)
        if alike is None:
            kinds.append((layer, [index]))
        else:
            alike.append(index)
    return [LayerGroup(tuple(layers), layer) for layer, layers in kinds]


def model_info(
    model: str | os.PathLike[str] | None = None,
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    load_format: str = "auto",
    **options: Any,
) -> dict[str, Any]:
    """What `LLM(model, **options).info()` says, and what the model needs in memory, without loading its weights.

    Of the weights' files the headers are read, and everything that a load would refuse is refused; of a repository on
    the hub only the small files are fetched, and what the weights come to follows from its configuration. `options` are
    those of EngineOptions; `load_format="dummy"` is for a directory without weights. What is there in addition:

    - `layer_groups`: the layers by kind, each with `layers`, their indices, and `layer`, the fields of `spec.Layer`;
    - `checkpoint_bytes`: bytes of the tensors in the files; None where they are not here;
    - `stored_types`: of the tensors in the files, by the type as which they are stored, their number (`tensors`) and
      their `bytes`; None likewise, empty where they are packed;
    - `mapped_bytes`: bytes of weights that are mapped from a packed file, which processes share;
    - `memory`: bytes of `weights`, `vectors` (norms, biases and tables), `kv_cache` (of one sequence of max_model_len
      tokens) and `buffers` (about, of a step of that sequence), of all four (`needed`), and of what is `available`
      here; `holds_tokens`, the longest sequence that an engine's cache would hold here, 0 if there can be none;
    - `fits`: whether there can be an engine here at all;
    - `verdict`: the same in words, with the longest sequence, or the format in which it would fit.

    Raises ModelNotFoundError, ModelFileError, ConfigError, UnsupportedModelError, TokenizerError,
    InvalidParameterError.
    """
    return inspect(model, tokenizer=tokenizer, revision=revision, load_format=load_format, **options)[1]


def inspect(
    model: str | os.PathLike[str] | None = None,
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    load_format: str = "auto",
    **options: Any,
) -> tuple[ModelSpec, dict[str, Any]]:
    """A model's spec, and what `model_info` says of it, which explains arguments and errors."""
    check_choice("load_format", load_format, LOAD_FORMATS)
    checked = EngineOptions(**options)
    files = read_model_files(find_model(model, revision, weights=False))
    checked = checked.for_packed(files.packed, files.path)
    weights: str | None = os.fspath(files.weights)
    not_here = model is not None and is_repository(os.fspath(model)) and not has_weights(files.path)
    if load_format == "dummy" or not_here:
        weights = None
    at = files.path if tokenizer is None else find_model(tokenizer, weights=False)
    is_packed = files.packed is not None
    maps = is_packed or PackedCache.open(checked.packed_cache_limit).limit > 0
    may_page = checked.allow_paging and maps and load_format != "dummy"
    measured = _Measured(files.spec.to_json(), weights, checked, is_packed=is_packed, may_page=may_page)
    figures = measured.figures()
    return files.spec, {
        **facts(EMBEDDED if model is None else os.fspath(model), files, Tokenizer(at), figures["quantization"]),
        "layer_groups": [_group_facts(files.spec, group) for group in layer_groups(files.spec)],
        **figures,
        **_judge(measured, figures),
    }


def facts(name: str, files: ModelFiles, tokenizer: Tokenizer, quantization: str) -> dict[str, Any]:
    """What a model's small files say of it, and what becomes of its weights.

    `stored_as`: how the files store what is quantized in them, None where weights are plain; `conversion`: what was
    done to those for `quantization`.
    """
    from ferrule._text.parsers import reasoning_parser_for, tool_call_parser_for

    spec = files.spec
    templates = "\n".join(tokenizer.chat_templates.values())
    return {
        "model": name,
        "directory": os.fspath(files.path.parent if is_gguf(files.path) else files.path),
        "file": os.fspath(files.path) if is_gguf(files.path) else None,
        "architecture": spec.architecture,
        "layers": len(spec.layers),
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "context": spec.max_position_embeddings,
        "tokenizer": tokenizer.available,
        "chat_template": "default" in tokenizer.chat_templates,
        "tool_call_parser": tool_call_parser_for(templates, spec.architecture),
        "reasoning_parser": reasoning_parser_for(templates, spec.architecture),
        "eos_token_ids": list(end_of_sequence(files, tokenizer)),
        "stored_as": None if spec.stored_as is None else stored_words(spec.stored_as),
        "conversion": conversion_words(spec.stored_as, quantization),
    }


def end_of_sequence(files: ModelFiles, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end the model's output: the tokenizer's where its configuration names none."""
    token = tokenizer.special_tokens.get("eos_token")
    token_id = None if token is None else tokenizer.token_id(token)
    return files.eos_token_ids or (() if token_id is None else (token_id,))


def ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Rising numbers as runs of neighbours: the first and the last of each."""
    runs = [
        [number for _, number in run]
        for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    return [(run[0], run[-1]) for run in runs]


@dataclass(frozen=True)
class _Measured:
    """What there is to measure, in the form that the native module takes."""

    spec: str
    weights: str | None
    """A directory or a file; None where there are none."""
    options: EngineOptions
    is_packed: bool
    """Whether the weights have one format and can have no other."""
    may_page: bool
    """Whether an engine maps the weights, and may have more of them than memory."""

    def figures(self, quantization: str | None = None) -> dict[str, Any]:
        """What it comes to, in another format than the one asked for if there is one."""
        from ferrule import _native

        options = self.options if quantization is None else replace(self.options, quantization=quantization)
        return json.loads(_native.measure(self.spec, self.weights, options.to_json()))


def _group_facts(spec: ModelSpec, group: LayerGroup) -> dict[str, Any]:
    layer = asdict(group.layer)
    rope = group.layer.attention.rope
    layer["attention"]["rope"] = None if rope is None else asdict(spec.ropes[rope])
    return {"layers": list(group.layers), "layer": layer}


def _judge(measured: _Measured, figures: dict[str, Any]) -> dict[str, Any]:
    """Whether there can be an engine, and for how long a sequence."""
    memory, wanted = figures["memory"], figures["max_model_len"]
    of_others = memory["vectors"] + memory["buffers"]
    if not _has_room(memory) and measured.may_page and of_others <= memory["available"]:
        needed, available = size_text(_least(memory)), size_text(memory["available"])
        verdict = f"Weights and buffers take {needed}, and {available} are available here:"
        return {"fits": True, "verdict": f"{verdict} weights are read from a packed file again and again, slowly."}
    if not _has_room(memory):
        needed, available = size_text(_least(memory)), size_text(memory["available"])
        verdict = f"It does not fit: weights and buffers take {needed}, and {available} are available here."
        return {"fits": False, "verdict": f"{verdict} {_narrower(measured, figures['quantization'])}".rstrip()}
    if memory["holds_tokens"] >= wanted:
        return {"fits": True, "verdict": f"It fits, with sequences of {wanted:,} tokens."}
    share = "half of what the weights leave" if measured.options.kv_cache_memory is None else "kv_cache_memory"
    verdict = f"It fits, with sequences of up to {memory['holds_tokens']:,} tokens:"
    cache = f"the cache of {wanted:,} would be {size_text(memory['kv_cache'])}, more than {share}."
    return {"fits": True, "verdict": f"{verdict} {cache}"}


def _has_room(memory: dict[str, Any]) -> bool:
    """For the weights, a step's buffers, and a page of cache at the least."""
    return memory["holds_tokens"] > 0 and _least(memory) <= memory["available"]


def _least(memory: dict[str, Any]) -> int:
    """Bytes of all but the cache."""
    return memory["needed"] - memory["kv_cache"]


def _narrower(measured: _Measured, quantization: str) -> str:
    """The widest format of those that would fit."""
    if measured.is_packed:
        advice = "With allow_paging they would be read from their file again and again, slowly."
        return "" if measured.options.allow_paging else advice
    # What is kept as stored may be wider than any.
    wider = QUANTIZATIONS.index(quantization) if quantization in QUANTIZATIONS else QUANTIZATIONS.index("int8") - 1
    for other in QUANTIZATIONS[wider + 1 :]:
        memory = measured.figures(other)["memory"]
        if _has_room(memory):
            return f"As {other} they take {size_text(_least(memory))}, and fit."
    return "There is no format of weights in which they would."


def size_text(count: float) -> str:
    """Bytes, for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
