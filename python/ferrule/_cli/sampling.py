"""The options that say how tokens are chosen, and the line that says how it went."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from ferrule._api.llm import LLM
from ferrule._cli.help import options
from ferrule._params.declaration import Integer, Number, parameters
from ferrule._params.sampling import SamplingParams
from ferrule._params.structured import StructuredOutputsParams
from ferrule.errors import InvalidParameterError
from ferrule.outputs import RequestOutput

Command = TypeVar("Command", bound=Callable[..., Any])
Table = dict[str, dict[str, Any]]
"""Fields of SamplingParams, with what click.option wants to know of theirs; `name` where the option has another."""
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FLOAT: dict[str, Any] = {"type": float}
_INT: dict[str, Any] = {"type": int}


def _ids(context: click.Context, parameter: click.Parameter, texts: str | tuple[str, ...] | None) -> Any:
    """Reads token ids with commas between them: of one option, or of each where it may be repeated."""
    if isinstance(texts, tuple):
        return tuple(_ids(context, parameter, text) for text in texts)
    if texts is None:
        return None
    try:
        return tuple(int(word) for word in texts.split(","))
    except ValueError:
        raise click.BadParameter(f"{texts!r} is no list of token ids, as in 11,42", context, parameter) from None


def _bias(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> dict[int, float] | None:
    bias: dict[int, float] = {}
    for text in texts:
        token, _, value = text.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise click.BadParameter(f"{text!r} is no token id with a number, as in 42=-100", context, parameter) from (
                None
            )
    return bias or None


USUAL: Table = {
    "temperature": {"help": "0 takes the likeliest token. Default: the model's, else 0."},
    "top_p": {"help": "Keep the likeliest tokens that together reach this probability."},
    "top_k": {**_INT, "help": "Keep this many of the likeliest tokens."},
    "min_p": {"help": "Drop tokens less likely than this fraction of the likeliest."},
    "repetition_penalty": {"help": "Above 1, repeats become less likely."},
    "seed": {**_INT, "help": "The same seed gives the same tokens."},
    "prediction": {"metavar": "TEXT", "help": "What is expected to come; where it does it is there sooner."},
}
ENDS: Table = {
    "min_tokens": {**_INT, "help": "Nothing ends the output before so many."},
    "stop": {"multiple": True, "metavar": "TEXT", "help": "End where this text appears. May be repeated."},
    "stop_token_ids": {
        "name": "stop-token-id",
        "multiple": True,
        **_INT,
        "help": "End at this token. May be repeated.",
    },
    "include_stop_str_in_output": {"is_flag": True, "help": "Write what ended the output too."},
    "ignore_eos": {"is_flag": True, "help": "Go on where the model would end."},
    "skip_special_tokens": {
        "name": "special-tokens",
        "flag_value": False,
        "default": True,
        "help": "Write special tokens too.",
    },
}
FURTHER: Table = {
    "presence_penalty": {"help": "Subtracted from the logits of tokens that were written."},
    "frequency_penalty": {"help": "Subtracted once for each time."},
    "dynatemp_range": {"help": "Lets the temperature follow the entropy, by so much up and down."},
    "dynatemp_exponent": {"help": "How it does."},
    "top_n_sigma": {"help": "Keep logits within so many standard deviations of the highest."},
    "typical_p": {"help": "Keep the tokens of this probability whose surprise is nearest to the entropy."},
    "epsilon_cutoff": {"help": "Drop tokens less likely than this."},
    "eta_cutoff": {"help": "Drop tokens less likely than a bound that falls with the entropy."},
    "top_h": {"help": "Keep the likeliest tokens up to this share of the entropy."},
    "xtc_probability": {"help": "Probability of dropping all tokens above the XTC threshold except the least likely."},
    "xtc_threshold": {"help": "The probability that makes a token one of them."},
    "dry_multiplier": {"help": "What a token costs that goes on with a repeat."},
    "dry_base": {"help": "How much more, for each token that the repeat is longer."},
    "dry_allowed_length": {"help": "Tokens of a repeat that begins to cost something."},
    "dry_penalty_last_n": {"help": "Tokens in which repeats are looked for; -1 means all."},
    "dry_sequence_breakers": {
        "name": "dry-sequence-breaker",
        "multiple": True,
        "metavar": "TEXT",
        "help": "Repeats do not reach across this text. May be repeated.",
    },
    "mirostat": {"help": "1 or 2: hold the surprise of what is drawn."},
    "mirostat_tau": {"help": "That surprise, in bits."},
    "mirostat_eta": {"help": "How fast."},
    "no_repeat_ngram_size": {"help": "No sequence of so many tokens comes twice."},
    "bad_words": {
        "name": "bad-word",
        "multiple": True,
        "metavar": "TEXT",
        "help": "Never write this. May be repeated.",
    },
    "bad_words_ids": {
        "name": "bad-word-ids",
        "multiple": True,
        "callback": _ids,
        "metavar": "ID,ID,...",
        "help": "Never write these tokens one after the other. May be repeated.",
    },
    "allowed_token_ids": {"callback": _ids, "metavar": "ID,ID,...", "help": "Write these tokens alone."},
    "logit_bias": {
        "multiple": True,
        "callback": _bias,
        "metavar": "ID=NUMBER",
        "help": "Added to the logit of this token. May be repeated.",
    },
}
"""Further sampling options."""
REPORTS: Table = {
    "logprobs": {**_INT, "help": "Likeliest alternatives of each token in what --json prints."},
    "prompt_logprobs": {**_INT, "help": "Likewise of the prompt's tokens."},
    "entropy": {"is_flag": True, "help": "How undecided the model was before each token, there too."},
}
"""Options of commands that print reports."""
STRUCTURES: Table = {
    "json_schema": {"type": _FILE, "help": "Write JSON that the schema in this file allows."},
    "json_object": {"is_flag": True, "help": "Write a JSON object."},
    "regex": {"help": "Write what this regular expression matches as a whole."},
    "grammar": {"type": _FILE, "help": "Write what the grammar in this file derives (Lark)."},
    "choice": {"metavar": "A,B,...", "help": "Write one of these texts."},
}
NAMES = ("max_tokens", *USUAL, *ENDS, *FURTHER, *REPORTS)


def sampling_options(max_tokens: int | None, *, reports: bool = False) -> Callable[[Command], Command]:
    """Adds the options of sampling; the command gets them as keywords and hands them to `params`."""
    until = "the rest of the context" if max_tokens is None else str(max_tokens)
    most = {"type": int, "default": max_tokens, "help": f"Most tokens to write. Default: {until}."}

    def add(command: Command) -> Command:
        command = options("Structure", _rows(STRUCTURES))(command)
        if reports:
            command = options("Reports", _rows(REPORTS))(command)
        command = options("Further sampling (docs/sampling.md)", _rows(FURTHER))(command)
        command = options("Where it ends", [(("-n", "--max-tokens"), most), *_rows(ENDS)])(command)
        return options("Sampling", _rows(USUAL))(command)

    return add


def _rows(table: Table) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    rows: list[tuple[tuple[str, ...], dict[str, Any]]] = []
    declared = parameters(SamplingParams)
    for field, settings in table.items():
        name = settings.get("name", field.replace("_", "-"))
        bounds = declared[field].bounds if field in declared else None
        kind = _INT if isinstance(bounds, Integer) else _FLOAT if isinstance(bounds, Number) else {}
        rest = {key: value for key, value in settings.items() if key != "name"}
        rows.append(((f"--{name}", field), {**kind, **rest}))
    return rows


def split_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A command's keywords, as those of sampling and those of loading."""
    sampling = {name: options.pop(name) for name in (*NAMES, *STRUCTURES) if name in options}
    return sampling, options


def params(options: dict[str, Any]) -> SamplingParams:
    """Checked before a model is loaded.

    Raises InvalidParameterError.
    """
    structures = {name: options.pop(name) for name in STRUCTURES}
    given = {name: value for name, value in options.items() if value not in (None, ())}
    return SamplingParams.with_model_defaults(**given, structured_outputs=_structured(structures))


def _structured(options: dict[str, Any]) -> StructuredOutputsParams | None:
    given = [name for name, value in options.items() if value not in (None, False)]
    if not given:
        return None
    if len(given) > 1:
        named = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise InvalidParameterError(f"{named} exclude each other: the output can have one structure")
    value = options[given[0]]
    match given[0]:
        case "json_schema":
            return StructuredOutputsParams(json=_read(value))
        case "grammar":
            return StructuredOutputsParams(grammar=_read(value))
        case "choice":
            return StructuredOutputsParams(choice=value.split(","))
        case name:
            return StructuredOutputsParams(**{name: value})


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameterError(f"{path}: {error}") from None


def greedy_by_default(params: SamplingParams, llm: LLM) -> SamplingParams:
    """On the command line the likeliest token is taken, unless the user or the model says otherwise."""
    if params.temperature is None and llm.generation_config.temperature is None:
        return replace(params, temperature=0.0)
    return params


def summary(output: RequestOutput) -> str:
    """One line on what a request took."""
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
