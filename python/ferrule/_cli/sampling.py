"""Options of sampling, and the summary of a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from ferrule._cli.declared import Row, row
from ferrule._cli.help import options
from ferrule._params.declaration import parameters
from ferrule._params.sampling import SamplingParams
from ferrule._params.structured import StructuredOutputsParams
from ferrule.outputs import RequestOutput

Command = TypeVar("Command", bound=Callable[..., Any])
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
DECLARED = parameters(SamplingParams)


def _ids(context: click.Context, parameter: click.Parameter, texts: str | tuple[str, ...] | None) -> Any:
    """Parses token ids separated by commas; an option that may be repeated has several such lists."""
    if isinstance(texts, tuple):
        return tuple(_ids(context, parameter, text) for text in texts)
    if texts is None:
        return None
    try:
        return tuple(int(word) for word in texts.split(","))
    except ValueError:
        raise click.BadParameter(f"must be token ids such as 11,42, got {texts!r}", context, parameter) from None


def _bias(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> dict[int, float] | None:
    bias: dict[int, float] = {}
    for text in texts:
        token, _, value = text.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            message = f"must be a token id and a number, such as 42=-100, got {text!r}"
            raise click.BadParameter(message, context, parameter) from None
    return bias or None


_TEXTS: dict[str, Any] = {"multiple": True, "metavar": "TEXT"}
_IDS: dict[str, Any] = {"callback": _ids, "metavar": "ID,ID,..."}
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"unset": "the model's, else 0.7, or 0 for the embedded model"},
    "top_p": {"unset": "the model's, else 0.95 if it states no temperature"},
    "min_p": {"unset": "the model's, else 0.05 if it states no temperature"},
    "prediction": {
        "metavar": "TEXT",
        "effect": "Predicted output; speeds up generation where it matches and never changes a token",
    },
    "stop": _TEXTS,
    "stop_token_ids": {"option": "--stop-token-id", "multiple": True, "type": int},
    "skip_special_tokens": {"option": "--special-tokens", "effect": "Keep special tokens in the text"},
    "dry_sequence_breakers": {"option": "--dry-sequence-breaker", **_TEXTS},
    "bad_words": {"option": "--bad-word", **_TEXTS},
    "bad_words_ids": {"option": "--bad-word-ids", "multiple": True, **_IDS},
    "allowed_token_ids": _IDS,
    "logit_bias": {"multiple": True, "callback": _bias, "metavar": "ID=NUMBER"},
}
"""Settings that `declared.row` cannot derive from the declaration, such as the syntax of lists, by parameter."""
WITHOUT_OPTION = {"n", "best_of", "logits_processors", "detokenize", "output_kind", "structured_outputs"}
"""Fields without an option: functions, several completions, and structured outputs, whose options are `STRUCTURES`."""
USUAL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "prediction")
STOPPING = (
    *("max_tokens", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
    "skip_special_tokens",
)
REPORTS = ("logprobs", "prompt_logprobs", "entropy")
"""Parameters that only commands with a report have as options."""
OTHER = tuple(name for name in DECLARED if name not in {*WITHOUT_OPTION, *USUAL, *STOPPING, *REPORTS})
"""All other parameters, in the order of their declaration."""
STRUCTURES: list[Row] = [
    (
        ("--json-schema",),
        {"type": _FILE, "help": "File with a JSON schema that the output must match (default: none)."},
    ),
    (("--json-object",), {"is_flag": True, "help": "Write a JSON object."}),
    (("--regex",), {"help": "Regular expression that the whole output must match (default: none)."}),
    (
        ("--grammar",),
        {"type": _FILE, "help": "File with a grammar (Lark or GBNF) that the output must match (default: none)."},
    ),
    (("--choice",), {"metavar": "A,B,...", "help": "Texts one of which the output must be (default: none)."}),
]
STRUCTURE_NAMES = tuple(names[0].removeprefix("--").replace("-", "_") for names, _ in STRUCTURES)


def sampling_options(max_tokens: int | None, *, unset: str = "", reports: bool = False) -> Callable[[Command], Command]:
    """Adds the options of sampling; the command receives them as keywords and passes them to `params`.

    `max_tokens` is the default of that option; if it is None, `unset` describes the effect of an absent option.
    """
    limit = row(DECLARED["max_tokens"], default=max_tokens, unset=unset)
    limit = (("-n", *limit[0]), limit[1])
    groups: dict[str, list[Row]] = {
        "Sampling": _rows(USUAL),
        "Stopping": [limit, *_rows(STOPPING[1:])],
        "Other sampling parameters (docs/sampling.md)": _rows(OTHER),
        "Reports": _rows(REPORTS) if reports else [],
        "Structured output": STRUCTURES,
    }

    def add(command: Command) -> Command:
        for topic, rows in reversed(groups.items()):
            command = options(topic, rows)(command)
        return command

    return add


def _rows(names: Sequence[str]) -> list[Row]:
    return [row(DECLARED[name], **SETTINGS.get(name, {})) for name in names]


def split_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits the keywords of a command into those of sampling and those of loading."""
    names = (*USUAL, *STOPPING, *OTHER, *REPORTS, *STRUCTURE_NAMES)
    sampling = {name: options.pop(name) for name in names if name in options}
    return sampling, options


def params(options: dict[str, Any]) -> SamplingParams:
    """Returns the sampling parameters that options request.

    Raises InvalidParameterError, and click.UsageError for options that exclude each other.
    """
    structures = {name: options.pop(name) for name in STRUCTURE_NAMES}
    given = {name: value for name, value in options.items() if value not in (None, ())}
    return SamplingParams.with_model_defaults(**given, structured_outputs=_structured(structures))


def _structured(options: dict[str, Any]) -> StructuredOutputsParams | None:
    given = [name for name, value in options.items() if value not in (None, False)]
    if not given:
        return None
    if len(given) > 1:
        named = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise click.UsageError(f"{named} exclude each other; give one of them")
    value = options[given[0]]
    match given[0]:
        case "json_schema":
            return StructuredOutputsParams(json=_read("--json-schema", value))
        case "grammar":
            return StructuredOutputsParams(grammar=_read("--grammar", value))
        case "choice":
            return StructuredOutputsParams(choice=value.split(","))
        case name:
            return StructuredOutputsParams(**{name: value})


def _read(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"{option} must be a readable file, got {path} ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{option} must be a file of UTF-8 text, got {path} ({error})") from None


def summary(output: RequestOutput) -> str:
    """Summarizes tokens and times of a request in one line."""
    metrics, completion = output.metrics, output.outputs[0]
    parts = [f"prompt {metrics.prompt_tokens} tokens"]
    if metrics.time_to_first_token is not None:
        parts.append(f"first token after {metrics.time_to_first_token:.3f} s")
    parts.append(f"{metrics.output_tokens} tokens")
    if metrics.tokens_per_second is not None:
        parts.append(f"{metrics.tokens_per_second:.1f} tokens/s")
    if metrics.drafted_tokens:
        parts.append(f"{metrics.accepted_tokens} of {metrics.drafted_tokens} drafts accepted")
    parts.append(f"seed {completion.seed}")
    ended = completion.finish_reason or "interrupted"
    parts.append(ended if completion.stop_reason is None else f"{ended} at {completion.stop_reason!r}")
    return f"[{', '.join(parts)}]"
