"""`ferrule info`: architecture and memory requirements of a model, without loading it."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import click

from ferrule._api.info import LayerGroup, inspect, layer_groups, ranges, size_text
from ferrule._api.zeros import NOTABLE
from ferrule._cli.help import Command
from ferrule._cli.layers import count_words, frame_words, mixer_words
from ferrule._cli.model import model_argument, model_options, model_status
from ferrule._loading.shapes import find_shape, shape_names
from ferrule.archs.spec import LearnedPositions, ModelSpec, SinusoidalPositions

LABEL = 12
"""Width of the labels with the space after them, in columns; longer labels move their text to the right."""
COLUMNS = (60, 110)
"""Minimum and maximum width of a line, in columns."""
MAX_RANGES = 6
"""Maximum number of ranges of layers to list."""


@click.command(
    "info",
    cls=Command,
    examples=[
        ("The model that ships with ferrule:", "ferrule info"),
        ("Memory requirements of a model in int4:", "ferrule info Qwen/Qwen3-8B --quantization int4"),
        (
            "Memory requirements of a well-known shape with a long context:",
            "ferrule info --shape llama-8b --max-model-len 32768",
        ),
    ],
)
@model_argument
@click.option(
    "--shape", type=click.Choice(shape_names()), help="Well-known shape to show instead of MODEL (default: none)."
)
@model_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(model: str | None, shape: str | None, as_json: bool, **loading: Any) -> None:
    """Show the architecture and the memory requirements of MODEL, compared with the available memory.

    Weights are not loaded: only the headers of their files are read. Models of the hub are not downloaded.
    """
    if shape is None:
        with model_status("reading the files", model):
            spec, info = inspect(model, **loading)
    elif model is not None:
        raise click.UsageError(f"give MODEL or --shape, not both, got {model!r} and {shape!r}")
    else:
        spec, info = inspect(find_shape(shape), load_format="dummy", **loading)
        info["model"] = shape
    if as_json:
        print(json.dumps(info))
        return
    print(f"{info['model']}: {info['architecture']}, {_parameters(info)}\n")
    columns = min(max(shutil.get_terminal_size((COLUMNS[1], 24)).columns, COLUMNS[0]), COLUMNS[1])
    for name, text in _lines(spec, info):
        label = f"{name:{LABEL - 1}} "
        # Do not break paths and hyphenated words.
        wrapper = textwrap.TextWrapper(columns, label, " " * LABEL, break_long_words=False, break_on_hyphens=False)
        print(wrapper.fill(text))


def _lines(spec: ModelSpec, info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield ("directory", info["directory"]) if info["file"] is None else ("file", info["file"])
    yield "context", f"{info['context']:,} tokens"
    yield "embedding", "; ".join(_embedding(spec))
    yield from _layers(spec)
    yield "tokenizer", _tokenizer(info)
    yield "files", _files(info)
    yield "weights", _weights(info, sum(table.rows * table.columns for table in spec.tables))
    if info["zeros"] is not None and info["zeros"]["share"] >= NOTABLE:
        yield "zeros", _zeros(info["zeros"])
    yield "KV cache", _cache(info)
    yield "memory", _memory(info["memory"])
    yield "", info["verdict"]
    if info["format_warning"] is not None:
        yield "warning", info["format_warning"]


def _parameters(info: Mapping[str, Any]) -> str:
    count, active = info["parameters"], info["parameters_per_token"]
    return f"{_large(count)} parameters" + (f", {_large(active)} active per token" if active < count else "")


def _embedding(spec: ModelSpec) -> Iterator[str]:
    embedding, lm_head = spec.embedding, spec.lm_head
    width = f"{spec.hidden_size:,}"
    if embedding.width is not None:
        width = f"{embedding.width:,}, projected to {width}"
    yield f"vocabulary of {spec.vocab_size:,}, {width} wide"
    if embedding.scale != 1:
        yield f"scaled by {embedding.scale:.5g}"
    if spec.streams is not None:
        yield f"{spec.streams.count} residual streams"
    for table in spec.tables:
        yield f"a table of {table.rows:,} x {table.columns:,} for the layers, which stays in its file"
    match embedding.positions:
        case LearnedPositions():
            yield "learned positions"
        case SinusoidalPositions():
            yield "sinusoidal positions"
        case None:
            pass
    if embedding.token_types:
        yield f"{embedding.token_types} token types"
    if spec.classifier is not None:
        yield f"classifier of {count_words(spec.classifier.labels, 'label')}"
    if lm_head is None:
        yield "no lm_head"
        return
    yield "tied with lm_head" if lm_head.tied else "separate lm_head"
    if lm_head.scale != 1:
        yield f"logits scaled by {lm_head.scale:.4g}"
    if lm_head.softcap is not None:
        yield f"logit softcap {lm_head.softcap:g}"


def _layers(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    groups = layer_groups(spec)
    count = len(spec.layers)
    kinds = "" if count == 1 else ", identical" if len(groups) == 1 else f", of {len(groups)} kinds"
    yield "layers", f"{count}{kinds}" + ("" if spec.causal else "; bidirectional attention")
    for group in groups:
        if len(groups) > 1:
            yield "", _numbers(group)
        for block in group.layer.blocks:
            kind, words = mixer_words(block.mixer, spec.ropes)
            yield f"  {kind}", words
        if frame := frame_words(group.layer):
            yield "  norms", frame


def _numbers(group: LayerGroup) -> str:
    runs = [f"{first}" if first == last else f"{first}-{last}" for first, last in ranges(group.layers)]
    more = ["..."] if len(runs) > MAX_RANGES else []
    return f"{count_words(len(group.layers), 'layer')}: {', '.join([*runs[:MAX_RANGES], *more])}"


def _tokenizer(info: Mapping[str, Any]) -> str:
    if not info["tokenizer"]:
        return "none: prompts must be token ids"
    template = "with a chat template" if info["chat_template"] else "without a chat template"
    parsers = {"tool calls": info["tool_call_parser"], "reasoning": info["reasoning_parser"]}
    if any(parsers.values()):
        template += f" ({', '.join(f'{name}: {parser}' for name, parser in parsers.items() if parser is not None)})"
    ids = ", ".join(map(str, info["eos_token_ids"])) or "none"
    return f"{template}; end-of-sequence tokens: {ids}"


def _files(info: Mapping[str, Any]) -> str:
    count = info["checkpoint_bytes"]
    if count is None:
        return "not downloaded"
    types = ", ".join(f"{each['tensors']} as {name}" for name, each in info["stored_types"].items())
    stored = [] if info["stored_as"] is None else [info["stored_as"]]
    how = f"tensors: {types}" if types else "packed"
    return "; ".join([f"{size_text(count)}, {_bits(count, info['parameters'])} bits per weight", *stored, how])


def _weights(info: Mapping[str, Any], in_tables: int) -> str:
    """Describes the packed matrices; `in_tables` is the number of weights that stay in the files."""
    count, read = info["weight_bytes"], info["weight_bytes_per_token"]
    each = f"; {size_text(read)} read per token" if read < count else ""
    mapped = ", mapped" if info["mapped_bytes"] else ""
    made = "" if info["conversion"] is None else f"; {info['conversion']}"
    by_format = info["weight_bytes_by_format"]
    formats = ", ".join(f"{size_text(of_format)} as {name}" for name, of_format in by_format.items())
    formats = f" ({formats})" if list(by_format) != [info["quantization"]] else ""
    of_all = f"{size_text(count)}{formats}, {_bits(count, info['parameters'] - in_tables)} bits per weight"
    return f"{info['quantization']}: {of_all}{mapped}{each}{made}"


def _zeros(zeros: Mapping[str, Any]) -> str:
    """Describes the zeros of a checkpoint, and what sparse formats would save."""
    share = f"{zeros['share']:.0%} of the weights in the layers, from a sample of {zeros['sampled']:,}"
    if zeros["sparsity"] is None:
        return f"{share}; too few for sparse formats, which store half of the weights"
    saves = ", ".join(f"{size_text(count)} less than {name[:4]} as {name}" for name, count in zeros["saves"].items())
    return f"{share}; ferrule quantize --sparsity {zeros['sparsity']} --pruning magnitude keeps them: {saves}"


def _cache(info: Mapping[str, Any]) -> str:
    windows = [group for group in info["kv_windows"] if group["window"] is not None]
    bounded = [
        f"{size_text(each['bytes_per_token'])} of it in a window of {each['window']:,} tokens" for each in windows
    ]
    states = [f"states of {size_text(info['state_bytes'])} per sequence"] if info["state_bytes"] else []
    per_token = size_text(info["kv_bytes_per_token"])
    return "; ".join([f"{info['kv_cache_dtype']}: {per_token} per token", *bounded, *states])


def _memory(memory: Mapping[str, Any]) -> str:
    parts = {
        "weights": memory["weights"] + memory["vectors"],
        "KV cache of one sequence": memory["kv_cache"],
        "buffers": memory["buffers"],
    }
    of = ", ".join(f"{name} {size_text(count)}" for name, count in parts.items())
    return f"needs {size_text(memory['needed'])} ({of}); {size_text(memory['available'])} available"


def _bits(count: int, parameters: int) -> str:
    return f"{8 * count / parameters:.3g}"


def _large(count: int) -> str:
    for size, name in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:.3g} {name}"
    return f"{count:,}"
