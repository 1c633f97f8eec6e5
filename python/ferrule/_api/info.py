"""Facts about a model and its memory requirements, without loading its weights."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ferrule._api.format_loss import format_warning
from ferrule._loading import EMBEDDED, ModelFiles, find_model, has_weights, is_remote, read_model_files
from ferrule._loading.gguf import is_gguf
from ferrule._loading.packed_cache import PackedCache
from ferrule._loading.quantized import conversion_words, stored_words
from ferrule._params.options import LOAD_FORMATS, QUANTIZATIONS, EngineOptions
from ferrule._text.tokenizer import Tokenizer
from ferrule._validation import check_choice
from ferrule.archs.spec import Attention, CompressedAttention, Layer, ModelSpec

if TYPE_CHECKING:
    from ferrule._text.parsers.families import ReasoningFamily, ToolCallFamily


@dataclass(frozen=True)
class LayerGroup:
    """Layers with equal configuration."""

    layers: tuple[int, ...]
    """Indices of the layers."""
    layer: Layer
    """Configuration that the layers share."""


def layer_groups(spec: ModelSpec) -> list[LayerGroup]:
    """Groups the layers of a model by configuration, in order of first occurrence."""
    kinds: list[tuple[Layer, list[int]]] = []
    for index, layer in enumerate(spec.layers):
        # There are few groups, and layers may hold long lists, so comparing is cheaper than hashing.
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
    """Returns the fields of `LLM(model, **options).info()` and memory requirements, without loading the weights.

    Headers of weight files are read and checked as in a load. Of a repository on the hub only the small files are
    fetched, and the sizes of weights are computed from its configuration. `options` are those of EngineOptions;
    `load_format="dummy"` is for a directory without weights. Additional fields:

    - `layer_groups`: groups of equal layers, each with their indices (`layers`) and the fields of `spec.Layer`
      (`layer`);
    - `checkpoint_bytes`: bytes of the tensors in the files; None without local files;
    - `stored_types`: number (`tensors`) and `bytes` of the tensors in the files, by stored dtype; None without local
      files, empty for packed weights;
    - `mapped_bytes`: bytes of weights that are mapped from a packed file and shared between processes;
    - `table_bytes`: bytes of tables that stay in the files, of which only the rows of a step's tokens are read;
    - `memory`: bytes of `weights`, `vectors` (norms, biases and tables), `kv_cache` (for one sequence of max_model_len
      tokens) and `buffers` (approximately, for a step of that sequence), their sum (`needed`), and the memory
      `available` on this machine; `holds_tokens` is the longest sequence that the KV cache could hold, 0 if the model
      does not fit;
    - `fits`: whether the model can be loaded on this machine;
    - `verdict`: a sentence that says whether it fits, with the longest sequence or a quantization that would fit;
    - `format_warning`: a sentence if the format is known to hurt models of this size, else None;
    - `zeros`: zeros of a checkpoint in floating point, from a sample of the `matrices` in its layers, which have
      `weights` weights of which `sampled` were read: the `share` of zeros, the share of each four inputs with two
      zeros (`two_of_four`), the share that pruning to half would set to zero too (`missing`), the `sparsity` of
      `quantize` that fits them or None, and the bytes that its formats save, by name (`saves`). None for other files.

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
    """Returns the spec of a model and the result of `model_info`, which documents arguments and errors."""
    check_choice("load_format", load_format, LOAD_FORMATS)
    checked = EngineOptions(**options)
    files = read_model_files(find_model(model, revision, weights=False)).extended(checked.max_model_len)
    checked = checked.for_packed(files.packed, files.path)
    weights: str | None = os.fspath(files.weights)
    without_weights = model is not None and is_remote(os.fspath(model)) and not has_weights(files.path)
    if load_format == "dummy" or without_weights:
        weights = None
    at = files.path if tokenizer is None else find_model(tokenizer, weights=False)
    is_packed = files.packed is not None
    maps = is_packed or PackedCache.open(checked.packed_cache_limit).limit > 0
    may_page = checked.allow_paging and maps and load_format != "dummy"
    measured = _Measured(files.spec_json, weights, checked, is_packed=is_packed, may_page=may_page)
    figures = measured.figures()
    return files.spec, {
        **facts(EMBEDDED if model is None else os.fspath(model), files, Tokenizer(at), figures),
        "layer_groups": [_group_facts(files.spec, group) for group in layer_groups(files.spec)],
        **figures,
        **_judge(measured, figures),
        "zeros": None if weights is None or is_packed else _zeros(files),
    }


def _zeros(files: ModelFiles) -> dict[str, Any] | None:
    """Returns the zeros of a checkpoint in floating point; None for other files."""
    from ferrule._api.zeros import find_zeros

    zeros = None if files.spec.stored_as is not None or is_gguf(files.path) else find_zeros(files.path)
    return None if zeros is None else zeros.to_json()


def facts(name: str, files: ModelFiles, tokenizer: Tokenizer, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Returns facts from the small files of a model, and the conversion of its weights.

    `figures` are those of the engine. `stored_as` is the quantized format of the files, None for floating-point
    weights; `conversion` describes how weights are converted to `quantization`. `format_warning` is None for packed
    weights, which may be calibrated, and for a model that does not generate: their losses were not measured.
    """
    spec, quantization = files.spec, figures["quantization"]
    measured = spec.lm_head is not None and files.packed is None
    implied = implied_parsers(tokenizer.chat_templates, spec.architecture, tokenizer.special_tokens)
    tool_call_parser, reasoning_parser = implied.names
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
        "tool_call_parser": tool_call_parser,
        "reasoning_parser": reasoning_parser,
        "eos_token_ids": list(end_of_sequence(files, tokenizer)),
        "stored_as": None if spec.stored_as is None else stored_words(spec.stored_as),
        "conversion": conversion_words(spec.stored_as, quantization),
        "format_warning": format_warning(figures["parameters"], quantization) if measured else None,
    }


class ImpliedParsers(NamedTuple):
    """Parsers that the chat templates of a model imply, by name or derived; None where they imply none."""

    calls: str | ToolCallFamily | None
    reasoning: str | ReasoningFamily | None

    @property
    def names(self) -> tuple[str | None, str | None]:
        """Names of the parsers of tool calls and of reasoning."""
        calls, reasoning = (found if found is None or isinstance(found, str) else found.names[0] for found in self)
        return calls, reasoning


def implied_parsers(
    templates: Mapping[str, str], model_type: str, special_tokens: Mapping[str, str], *, derive: bool = True
) -> ImpliedParsers:
    """Returns the parsers that are made for a model's chat templates, or else, with `derive`, those derived from it."""
    from ferrule._text.chat import reads_tools
    from ferrule._text.derivation import derive_format
    from ferrule._text.parsers import DESCRIBED_TOOLS_PARSER, reasoning_parser_for, tool_call_parser_for

    joined = "\n".join(templates.values())
    template = template_for_tools(templates)
    described = template is not None and not reads_tools(template)
    calls = DESCRIBED_TOOLS_PARSER if described else tool_call_parser_for(joined, model_type)
    reasoning = reasoning_parser_for(joined, model_type)
    if template is None or not derive or (calls is not None and reasoning is not None):
        return ImpliedParsers(calls, reasoning)
    derived = derive_format(template, special_tokens)
    return ImpliedParsers(calls or derived.calls, reasoning or derived.reasoning)


def template_for_tools(templates: Mapping[str, str]) -> str | None:
    """Returns the chat template that is used with tools."""
    return templates.get("tool_use", templates.get("default"))


def end_of_sequence(files: ModelFiles, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the end-of-sequence token ids: those of the configuration, otherwise the tokenizer's."""
    token = tokenizer.special_tokens.get("eos_token")
    token_id = None if token is None else tokenizer.token_id(token)
    return files.eos_token_ids or (() if token_id is None else (token_id,))


def ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Splits ascending numbers into runs of consecutive numbers; returns the first and last number of each run."""
    runs = [
        [number for _, number in run]
        for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    return [(run[0], run[-1]) for run in runs]


@dataclass(frozen=True)
class _Measured:
    """Arguments of `_native.measure` for a model."""

    spec: str
    """Spec as JSON."""
    weights: str | None
    """Directory or file of the weights; None without local files."""
    options: EngineOptions
    is_packed: bool
    """Whether the weights are packed, so that their format is fixed."""
    may_page: bool
    """Whether the weights are mapped and may exceed the available memory."""

    def figures(self, quantization: str | None = None) -> dict[str, Any]:
        """Returns the sizes, for another quantization if one is given."""
        from ferrule import _native

        options = self.options if quantization is None else replace(self.options, quantization=quantization)
        return json.loads(_native.measure(self.spec, self.weights, options.to_json()))


def _group_facts(spec: ModelSpec, group: LayerGroup) -> dict[str, Any]:
    layer: dict[str, Any] = json.loads(json.dumps(asdict(group.layer)))  # lists for tuples
    for block, facts in zip(group.layer.blocks, layer["blocks"], strict=True):
        if isinstance(block.mixer, Attention | CompressedAttention) and block.mixer.rope is not None:
            facts["mixer"]["rope"] = asdict(spec.ropes[block.mixer.rope])
    return {"layers": list(group.layers), "layer": layer}


def _judge(measured: _Measured, figures: dict[str, Any]) -> dict[str, Any]:
    """Returns `fits` and `verdict` of `model_info`."""
    memory, wanted = figures["memory"], figures["max_model_len"]
    unmapped = memory["vectors"] + memory["buffers"]
    if not _has_room(memory) and measured.may_page and unmapped <= memory["available"]:
        needed, available = size_text(_bytes_without_cache(memory)), size_text(memory["available"])
        verdict = f"Weights and buffers need {needed}, but {available} are available:"
        return {"fits": True, "verdict": f"{verdict} each step reads weights from the packed file, which is slow."}
    if not _has_room(memory):
        needed, available = size_text(_bytes_without_cache(memory)), size_text(memory["available"])
        verdict = f"The model does not fit: weights and buffers need {needed}, but {available} are available."
        return {
            "fits": False,
            "verdict": f"{verdict} {_smaller_quantization(measured, figures['quantization'])}".rstrip(),
        }
    if memory["holds_tokens"] >= wanted:
        return {"fits": True, "verdict": f"The model fits, with sequences of {wanted:,} tokens."}
    share = (
        "half of the memory that the weights leave" if measured.options.kv_cache_memory is None else "kv_cache_memory"
    )
    verdict = f"The model fits, with sequences of up to {memory['holds_tokens']:,} tokens:"
    cache = f"the KV cache of {wanted:,} tokens needs {size_text(memory['kv_cache'])}, more than {share}."
    return {"fits": True, "verdict": f"{verdict} {cache}"}


def _has_room(memory: dict[str, Any]) -> bool:
    """Whether weights, buffers of a step and one page of the KV cache fit into memory."""
    return memory["holds_tokens"] > 0 and _bytes_without_cache(memory) <= memory["available"]


def _bytes_without_cache(memory: dict[str, Any]) -> int:
    """Returns the bytes needed without the KV cache."""
    return memory["needed"] - memory["kv_cache"]


def _smaller_quantization(measured: _Measured, quantization: str) -> str:
    """Describes the widest quantization with which the model would fit."""
    if measured.is_packed:
        advice = "With allow_paging each step would read the weights from their file, which is slow."
        return "" if measured.options.allow_paging else advice
    # Weights in their stored format may be wider than any quantization.
    wider = QUANTIZATIONS.index(quantization) if quantization in QUANTIZATIONS else QUANTIZATIONS.index("int8") - 1
    for other in QUANTIZATIONS[wider + 1 :]:
        memory = measured.figures(other)["memory"]
        if _has_room(memory):
            return f"With quantization={other} they need {size_text(_bytes_without_cache(memory))} and fit."
    return "It does not fit with any quantization."


def size_text(count: float) -> str:
    """Formats a number of bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
