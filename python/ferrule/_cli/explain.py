"""`ferrule explain`: candidates and probabilities of each generated token."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ferrule._api.answer_defaults import with_defaults
from ferrule._cli.help import Command
from ferrule._cli.model import load, model_options, prefix_cache_option, speculative_options
from ferrule._cli.prompt import prompt_arguments, split_words
from ferrule._cli.reasons import reason
from ferrule._cli.sampling import params, sampling_options, split_options
from ferrule._cli.served_models import short_name
from ferrule._cli.status import StatusLine
from ferrule._loading.resolve import EMBEDDED
from ferrule.outputs import Explanation

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ferrule._api.llm import LLM
    from ferrule._params.sampling import SamplingParams


@click.command(
    "explain",
    cls=Command,
    examples=[
        ("Candidates of three tokens:", 'ferrule explain "The capital of France is" -n 3'),
        (
            "Effect of each sampler stage:",
            'ferrule explain "Once" --temperature 0.8 --top-p 0.9 --min-p 0.05',
        ),
        ("A page to read in a browser and to share:", 'ferrule explain "Once upon a time," -n 50 --html once.html'),
        ("For programs:", 'ferrule explain "Once upon a time," --top 20 --json'),
    ],
)
@prompt_arguments
@sampling_options(max_tokens=5)
@model_options
@prefix_cache_option
@speculative_options
@click.option(
    "--top",
    type=click.IntRange(1, 100),
    default=8,
    show_default=True,
    help="Number of candidates to show for each token.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--html",
    "page",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the explanation to FILE as one HTML page, with tokens colored by certainty (default: print it).",
)
def command(words: tuple[str, ...], top: int, as_json: bool, page: Path | None, **options: Any) -> None:
    """Show how MODEL continues PROMPT: candidates, dropped candidates and the reason for each token."""
    from ferrule._cli.explain_page import check_page, explanation_page

    model, prompt = split_words(words)
    sampling, loading = split_options(options)
    if page is not None:
        check_page(page)
    wanted = params(sampling)
    with load(model, loading) as llm:
        wanted = with_defaults(wanted, llm)
        tokens = [(token, llm.token_text(token)) for token in llm.tokenize(prompt)]
        steps = _steps(llm, prompt, wanted, top, printed=page is None and not as_json)
        if page is not None:
            steps = list(steps)
            name = EMBEDDED if model is None else short_name(model)
            page.write_text(explanation_page(name, prompt, tokens, wanted, steps), encoding="utf-8")
        if as_json:
            pieces = [{"token_id": token, "text": text} for token, text in tokens]
            print(json.dumps({"prompt": prompt, "tokens": pieces, "steps": [asdict(step) for step in steps]}))
            return
        if page is not None:
            print(f"The explanation is in {page}.")
            return
        from rich.console import Console

        console = Console(highlight=False)
        _show_prompt(console, prompt, tokens, vocab_size=llm.info()["vocab_size"])
        text = prompt
        for number, step in enumerate(steps, start=1):
            _show_step(console, number, step)
            text += step.text
        console.print(f"\n[bold]Text so far[/bold]  {_escaped(text)}")


def _steps(
    llm: LLM, prompt: str, wanted: SamplingParams, top: int, *, printed: bool
) -> Generator[Explanation, None, None]:
    """Yields the explanations of all tokens, with a status line until the first one is printed."""
    with StatusLine("reading the prompt") as status:
        steps = llm.explain(prompt, wanted, candidates=top, progress=status.read_tokens)
        for number, step in enumerate(steps, start=1):
            if printed:
                status.clear()
            status.update(f"explaining the answer: {number:,} of at most {wanted.max_tokens:,} tokens")
            yield step


def _show_prompt(console: Console, prompt: str, tokens: Iterable[tuple[int, str]], *, vocab_size: int) -> None:
    from rich.columns import Columns

    console.print(f"[bold]Prompt[/bold]  {_escaped(prompt)}")
    console.print(f"[bold]Tokens[/bold]  from a vocabulary of {vocab_size:,}; the model sees only their ids:")
    # Show each token above its id; a long prompt takes several rows.
    console.print(Columns([f"{_shown(text)}\n[dim]{token}[/dim]" for token, text in tokens], padding=(0, 2)))
    console.print("The model gives every token a score, its logit; softmax turns scores into probabilities.")


def _show_step(console: Console, number: int, step: Explanation) -> None:
    console.print(f"\n[bold]Token {number}[/bold]")
    console.print(_candidates(step))
    if step.stages:
        console.print(_stages(step))
    console.print(_escaped(reason(step)))


def _candidates(step: Explanation) -> Table:
    table = _table("token", ("id", "logit", "probability", "after sampling"))
    table.add_column("", overflow="fold")
    for candidate in step.candidates:
        chosen = candidate.token_id == step.token_id
        table.add_row(
            _shown(candidate.text),
            str(candidate.token_id),
            f"{candidate.logit:.3f}",
            f"{candidate.probability:.2%}",
            f"{candidate.final_probability:.2%}" if candidate.dropped_by is None else "-",
            "<- chosen" if chosen else "" if candidate.dropped_by is None else f"dropped by {candidate.dropped_by}",
            style="bold green" if chosen else "dim" if candidate.dropped_by is not None else None,
        )
    return table


def _stages(step: Explanation) -> Table:
    """Returns a table of the remaining tokens after each stage and the probability of the sampled token."""
    table = _table("stage", ("tokens left", "entropy", f"probability of {_shown(step.text)}"))
    chosen = next((c for c in step.candidates if c.token_id == step.token_id), None)
    for place, stage in enumerate(step.stages):
        probability = "" if chosen is None else f"{chosen.stage_probabilities[place]:.2%}"
        table.add_row(stage.name, f"{stage.tokens_left:,}", f"{stage.entropy:.3f} nats", probability)
    return table


def _table(first: str, numbers: Iterable[str]) -> Table:
    """Creates a table with a column of names and columns of numbers, which wrap on a narrow terminal."""
    from rich.table import Table

    table = Table(box=None, header_style="dim")
    table.add_column(first, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _shown(text: str) -> str:
    return _escaped(repr(text)[1:-1].replace(" ", "\N{OPEN BOX}"))


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
