"""`ferrule run`: continues a prompt."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import click

from ferrule.cli.model import load, model_options, prefix_cache_option, speculative_options
from ferrule.cli.prompt import prompt_arguments, split_words
from ferrule.cli.sampling import greedy_by_default, params, sampling_options, split_options, summary


@click.command("run")
@prompt_arguments
@sampling_options(max_tokens=256)
@model_options
@prefix_cache_option
@speculative_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
@click.option("-q", "--quiet", is_flag=True, help="No statistics on stderr.")
def command(words: tuple[str, ...], as_json: bool, quiet: bool, **options: Any) -> None:
    """Continue PROMPT ("-" reads it from stdin) with MODEL, or with the small model that ships with ferrule.

    \b
        ferrule run "Once upon a time,"
        ferrule run ./my-model "def fibonacci(n):" -n 64 --stop "\\n\\n"
    """  # noqa: D301
    model, prompt = split_words(words)
    sampling, loading = split_options(options)
    wanted = params(sampling)
    with load(model, loading) as llm:
        if sys.stdout.isatty() and not as_json:
            sys.stdout.write(prompt)  # for people, the text as it reads; for programs, what the model wrote
        output = None
        for delta in llm.stream(prompt, greedy_by_default(wanted, llm)):
            output = delta.output
            if delta.text and not as_json:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
        if output is None:
            return
        if as_json:
            completion = asdict(output.outputs[0])
            print(json.dumps({"model": llm.info()["model"], **completion, "metrics": asdict(output.metrics)}))
        else:
            print(flush=True)
        if not quiet and not as_json:
            print(summary(output), file=sys.stderr)
