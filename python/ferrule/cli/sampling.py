"""The options that say how tokens are chosen, and the line that says how it went."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from ferrule.errors import InvalidParameterError
from ferrule.llm import LLM
from ferrule.outputs import RequestOutput
from ferrule.params import WHOLE_NUMBERS, SamplingParams
from ferrule.structured import StructuredOutputsParams

Command = TypeVar("Command", bound=Callable[..., Any])
FURTHER = {
    "presence_penalty": "Subtracted from the logits of tokens that were written.",
    "frequency_penalty": "Subtracted once for each time.",
    "dynatemp_range": "Lets the temperature follow the entropy, by so much up and down.",
    "dynatemp_exponent": "How it does.",
    "top_n_sigma": "Keep logits within so many standard deviations of the highest.",
    "typical_p": "Keep the tokens of this probability whose surprise is nearest to the entropy.",
    "epsilon_cutoff": "Drop tokens less likely than this.",
    "eta_cutoff": "Drop tokens less likely than a bound that falls with the entropy.",
    "top_h": "Keep the likeliest tokens up to this share of the entropy.",
    "xtc_probability": "How often the likeliest tokens are dropped, but for the last of them.",
    "xtc_threshold": "The probability that makes a token one of them.",
    "dry_multiplier": "What a token costs that goes on with a repeat.",
    "dry_base": "How much more, for each token that the repeat is longer.",
    "dry_allowed_length": "Tokens of a repeat that begins to cost something.",
    "dry_penalty_last_n": "Tokens in which repeats are looked for; -1 means all.",
    "mirostat": "1 or 2: hold the surprise of what is drawn.",
    "mirostat_tau": "That surprise, in bits.",
    "mirostat_eta": "How fast.",
    "no_repeat_ngram_size": "No sequence of so many tokens comes twice.",
}
"""Stages that few ask for: numbers of SamplingParams, with what their options say of them."""
NAMES = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "ignore_eos"),
    *("bad_words", *FURTHER),
)
STRUCTURES = ("json_schema", "json_object", "regex", "grammar", "choice")
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def sampling_options(max_tokens: int | None) -> Callable[[Command], Command]:
    """Adds the options of sampling; the command gets them as keywords and hands them to `params`."""
    until = "the rest of the context" if max_tokens is None else str(max_tokens)
    options = [
        click.option(
            "-n", "--max-tokens", type=int, default=max_tokens, help=f"Most tokens to write. Default: {until}."
        ),
        click.option("--temperature", type=float, help="0 takes the likeliest token. Default: the model's, else 0."),
        click.option("--top-p", type=float, help="Keep the likeliest tokens that together reach this probability."),
        click.option("--top-k", type=int, help="Keep this many of the likeliest tokens."),
        click.option("--min-p", type=float, help="Drop tokens less likely than this fraction of the likeliest."),
        click.option("--repetition-penalty", type=float, help="Above 1, repeats become less likely."),
        *(
            click.option(f"--{name.replace('_', '-')}", type=int if name in WHOLE_NUMBERS else float, help=text)
            for name, text in FURTHER.items()
        ),
        click.option(
            "--bad-word", "bad_words", multiple=True, metavar="TEXT", help="Never write this. May be repeated."
        ),
        click.option("--seed", type=int, help="The same seed gives the same tokens."),
        click.option("--stop", multiple=True, metavar="TEXT", help="End where this text appears. May be repeated."),
        click.option("--ignore-eos", is_flag=True, help="Go on where the model would end."),
        click.option("--json-schema", type=_FILE, help="Write JSON that the schema in this file allows."),
        click.option("--json-object", is_flag=True, help="Write a JSON object."),
        click.option("--regex", help="Write what this regular expression matches as a whole."),
        click.option("--grammar", type=_FILE, help="Write what the grammar in this file derives (Lark)."),
        click.option("--choice", metavar="A,B,...", help="Write one of these texts."),
    ]

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def split_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A command's keywords, as those of sampling and those of loading."""
    sampling = {name: options.pop(name) for name in (*NAMES, *STRUCTURES)}
    return sampling, options


def params(options: dict[str, Any]) -> SamplingParams:
    """Checked before a model is loaded.

    Raises InvalidParameterError.
    """
    structures = {name: options.pop(name) for name in STRUCTURES}
    given = {name: value for name, value in options.items() if value is not None}
    return SamplingParams(**given, structured_outputs=_structured(structures))


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
    if params.temperature is None and llm.get_default_sampling_params().temperature is None:
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
