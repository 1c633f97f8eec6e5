"""`ferrule run`: answers or continues a prompt, or starts a chat."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ferrule._api.answer_defaults import is_greedy_toy
from ferrule._api.llm import LLM
from ferrule._cli.chat import run_session
from ferrule._cli.help import Command
from ferrule._cli.model import load, model_options, prefix_cache_option, speculative_options
from ferrule._cli.prompt import prompt_arguments, split_model
from ferrule._cli.sampling import params, sampling_options, split_options
from ferrule._params.sampling import SamplingParams
from ferrule._vision.images import read_image

if TYPE_CHECKING:
    from ferrule._text.chat import Message


@click.command(
    "run",
    cls=Command,
    examples=[
        ("Answer a question with a model of `ferrule search`:", 'ferrule run qwen3:0.6b "Why is the sky blue?"'),
        ("Chat with it:", "ferrule run qwen3:0.6b"),
        ("Ask about a file:", "ferrule run qwen3:0.6b < question.txt"),
        ("Ask about an image:", 'ferrule run HuggingFaceTB/SmolVLM-256M-Instruct --image photo.jpg "What is this?"'),
        ("Continue a text instead of answering:", 'ferrule run --raw Qwen/Qwen3-0.6B "Once upon a time,"'),
        ("The model that ships with ferrule continues a prompt:", 'ferrule run "Once upon a time,"'),
        ("Stop at an empty line; the prompt from a file:", "ferrule run ./my-model - --stop $'\\n\\n' < prompt.txt"),
        ("A choice of two answers:", 'ferrule run "The sky is" --choice blue,green'),
        ("For programs:", 'ferrule run "The capital of France is" -n 8 --logprobs 3 --json'),
    ],
)
@prompt_arguments
@click.option("--system", help="System prompt of an answer or a chat (default: none).")
@click.option(
    "--image",
    "images",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Image that PROMPT is about, for models that read images; may be repeated.",
)
@click.option("--raw", is_flag=True, help="Continue PROMPT as text, without the model's chat template.")
@sampling_options(max_tokens=None, unset="the model's, else 2048 for an answer, 256 for a continuation", reports=True)
@model_options
@prefix_cache_option
@speculative_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
@click.option("-q", "--quiet", is_flag=True, help="Do not print statistics to stderr.")
def command(
    words: tuple[str, ...],
    *,
    system: str | None,
    images: tuple[Path, ...],
    raw: bool,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> int:
    """Answer PROMPT with MODEL, or start a chat without PROMPT.

    A model with a chat template answers; other models, and the small one that ships with ferrule, continue the text.

    A single argument is MODEL if it is a file, a directory, org/repo or a name of `ferrule search`, else PROMPT.
    PROMPT is read from stdin, without its final newline, if it is "-", or if it is absent and stdin is piped.
    """
    model, prompt = split_model(words)
    if model is None and not prompt:
        raise click.UsageError("PROMPT is missing; give it in quotes or pipe it in, or start a chat: ferrule run MODEL")
    if model is not None and prompt == "":
        raise click.UsageError("PROMPT is empty; give it in quotes or pipe it in")
    sampling, loading = split_options(options)
    wanted = params(sampling)
    if prompt is None and (as_json or wanted.logprobs is not None or wanted.prompt_logprobs is not None):
        raise click.UsageError("PROMPT is missing; --json, --logprobs and --prompt-logprobs do not apply to a chat")
    if prompt is None and images:
        raise click.UsageError("PROMPT is missing; --image does not apply to a chat")
    with load(model, loading) as llm:
        if not quiet:
            _warn_of_format(llm)
        answers = not raw and not is_greedy_toy(llm) and "default" in llm.chat_templates
        if prompt is None:
            return _chat(llm, wanted, system, can_chat=not raw and "default" in llm.chat_templates, quiet=quiet)
        if system is not None and not answers:
            raise click.UsageError("--system requires a model with a chat template, and no --raw")
        if images and not answers:
            raise click.UsageError("--image requires a model with a chat template, and no --raw")
        pictures = [{"type": "image", "image": read_image(image, f"--image {image}")} for image in images]
        content = [*pictures, {"type": "text", "text": prompt}]
        asked = prompt if not answers else _messages(system, content if images else prompt)
        _print_output(llm, asked, wanted, as_json=as_json, quiet=quiet)
    return 0


def _warn_of_format(llm: LLM) -> None:
    warning = llm.info()["format_warning"]
    if warning is not None:
        print(f"warning: {warning}", file=sys.stderr)


def _chat(llm: LLM, wanted: SamplingParams, system: str | None, *, can_chat: bool, quiet: bool) -> int:
    from ferrule._cli.chat.answers import LocalAnswers
    from ferrule._cli.chat.conversation import Conversation
    from ferrule._cli.chat.session import Session

    if not can_chat:
        raise click.UsageError("PROMPT is missing: without a chat template the model can only continue a text")
    return run_session(Session(LocalAnswers(llm), Conversation(wanted, system), verbose=not quiet, plain=False))


def _messages(system: str | None, content: object) -> list[Message]:
    """Returns the messages of a question."""
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": content}]


def _print_output(llm: LLM, asked: str | list[Message], wanted: SamplingParams, *, as_json: bool, quiet: bool) -> None:
    """Prints an answer to messages, or the continuation of a text."""
    from ferrule._cli.chat.answers import Delta, stream_deltas
    from ferrule._cli.chat.display import PlainDisplay

    if isinstance(asked, str):
        stream = stream_deltas(llm, asked, wanted, continues=True, as_json=as_json)
    else:
        message_format = llm.message_format(reasoning_parser="auto")
        stream = stream_deltas(llm, llm.chat_prompt(asked), wanted, message_format, as_json=as_json)
    last = Delta()
    shown = None if as_json else PlainDisplay(sys.stdout)
    try:
        with closing(stream):
            # A terminal shows the whole text once the prompt is read, a pipe receives only the output.
            opening = asked if isinstance(asked, str) and sys.stdout.isatty() else ""
            for last in stream:
                if shown is None:
                    continue
                if last.content or last.output is not None:  # otherwise a status line may be visible
                    shown.add(replace(last, content=opening + last.content))
                    opening = ""
                else:
                    shown.add(last)
    finally:
        if shown is not None:
            shown.close()
    if as_json and last.output is not None:
        whole = asdict(last.output)
        record = {"model": llm.info()["model"], **whole["outputs"][0], "metrics": whole["metrics"]}
        if wanted.prompt_logprobs is not None:
            record["prompt_logprobs"] = whole["prompt_logprobs"]
        print(json.dumps(record))
    if last.notice and not as_json:
        print(f"[{last.notice}]", file=sys.stderr)
    if not quiet and not as_json and last.usage is not None:
        print(last.usage.summary, file=sys.stderr)
