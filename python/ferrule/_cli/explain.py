"""`ferrule explain`: candidates and probabilities of each generated token."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ferrule._api.answer_defaults import with_defaults
from ferrule._cli.help import Command
from ferrule._cli.model import load, model_options, prefix_cache_option, speculative_options
from ferrule._cli.prompt import prompt_arguments, split_words
from ferrule._cli.sampling import params, sampling_options, split_options
from ferrule.outputs import Candidate, Explanation

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@click.command(
    "explain",
    cls=Command,
    examples=[
        ("Candidates of three tokens:", 'ferrule explain "The capital of France is" -n 3'),
        (
            "Effect of each sampler stage:",
            'ferrule explain "Once" --temperature 0.8 --top-p 0.9 --min-p 0.05',
        ),
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
def command(words: tuple[str, ...], top: int, as_json: bool, **options: Any) -> None:
    """Show how MODEL continues PROMPT: candidates, dropped candidates and the reason for each token."""
    model, prompt = split_words(words)
    sampling, loading = split_options(options)
    wanted = params(sampling)
    with load(model, loading) as llm:
        wanted = with_defaults(wanted, llm)
        tokens = [(token, llm.token_text(token)) for token in llm.tokenize(prompt)]
        steps = llm.explain(prompt, wanted, candidates=top)
        if as_json:
            pieces = [{"token_id": token, "text": text} for token, text in tokens]
            print(json.dumps({"prompt": prompt, "tokens": pieces, "steps": [asdict(step) for step in steps]}))
            return
        from rich.console import Console

        console = Console(highlight=False)
        _show_prompt(console, prompt, tokens, vocab_size=llm.info()["vocab_size"])
        text = prompt
        for number, step in enumerate(steps, start=1):
            _show_step(console, number, step)
            text += step.text
        console.print(f"\n[bold]Text so far[/bold]  {_escaped(text)}")


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


def reason(step: Explanation) -> str:
    """Returns the reason for the sampled token, as a sentence."""
    if step.draw is None:
        return f"Greedy: {step.text!r} has the highest score of the tokens kept."
    share = next((c for c in step.candidates if c.token_id == step.token_id), None)
    probability = "" if share is None else f" (probability {share.final_probability:.2%})"
    return f"The random number {step.draw:.4f} selects {step.text!r}{probability}{_dropped(step.candidates)}."


def _dropped(candidates: Iterable[Candidate]) -> str:
    stages = dict.fromkeys(c.dropped_by for c in candidates if c.dropped_by is not None)
    return f"; {', '.join(stages)} dropped other tokens" if stages else ""


def _shown(text: str) -> str:
    return _escaped(repr(text)[1:-1].replace(" ", "\N{OPEN BOX}"))


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
