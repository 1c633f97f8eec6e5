"""`ferrule run`: continues a prompt."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import click

from ferrule._cli.help import Command
from ferrule._cli.model import load, model_options, prefix_cache_option, speculative_options
from ferrule._cli.prompt import prompt_arguments, split_words
from ferrule._cli.sampling import greedy_by_default, params, sampling_options, split_options, summary
from ferrule._cli.terminal import harmless


@click.command(
    "run",
    cls=Command,
    examples=[
        ("The model that ships with ferrule continues a prompt:", 'ferrule run "Once upon a time,"'),
        ("A model of the hub, with sampling:", 'ferrule run Qwen/Qwen3-0.6B "Once upon a time," --temperature 0.8'),
        ("Stop at an empty line; the prompt from a file:", "ferrule run ./my-model - --stop $'\\n\\n' < prompt.txt"),
        ("The prompt from a file:", "ferrule run < prompt.txt"),
        ("A choice of two answers:", 'ferrule run "The sky is" --choice blue,green'),
        ("For programs:", 'ferrule run "The capital of France is" -n 8 --logprobs 3 --json'),
    ],
)
@prompt_arguments
@sampling_options(max_tokens=256, reports=True)
@model_options
@prefix_cache_option
@speculative_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
@click.option("-q", "--quiet", is_flag=True, help="Do not print statistics to stderr.")
def command(words: tuple[str, ...], as_json: bool, quiet: bool, **options: Any) -> None:
    """Continue PROMPT with MODEL (default: the small model that ships with ferrule).

    PROMPT is read from stdin, without its final newline, if it is "-" or if there are no arguments and stdin is piped.
    """
    model, prompt = split_words(words)
    sampling, loading = split_options(options)
    wanted = params(sampling)
    with load(model, loading) as llm:
        terminal = sys.stdout.isatty()
        if terminal and not as_json:
            sys.stdout.write(harmless(prompt))  # a terminal shows the whole text, a pipe receives only the output
        output = None
        for delta in llm.stream(prompt, greedy_by_default(wanted, llm)):
            output = delta.output
            if delta.text and not as_json:
                sys.stdout.write(harmless(delta.text) if terminal else delta.text)
                sys.stdout.flush()
        if output is None:
            return
        if as_json:
            whole = asdict(output)
            record = {"model": llm.info()["model"], **whole["outputs"][0], "metrics": whole["metrics"]}
            if wanted.prompt_logprobs is not None:
                record["prompt_logprobs"] = whole["prompt_logprobs"]
            print(json.dumps(record))
        else:
            print(flush=True)
        if not quiet and not as_json:
            print(summary(output), file=sys.stderr)
