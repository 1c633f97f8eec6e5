"""`ferrule explain --html`: an explained answer as one HTML page, without scripts and requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import ferrule
from ferrule._cli.reasons import reason
from ferrule.errors import InvalidParameterError
from ferrule.outputs import Candidate, Explanation

if TYPE_CHECKING:
    from ferrule._params.sampling import SamplingParams

CERTAINTY_LIMITS = (0.9, 0.7, 0.4, 0.1)
"""Probabilities below which a token is of the next level, from 0 (certain) to 4, as in the chat page."""

CERTAINTY_LABELS = ("≥ 90 %", "70 to 90 %", "40 to 70 %", "10 to 40 %", "< 10 %")

STYLES = ("colors.css", "certainty.css")
"""Style sheets of the chat page, which define the colors."""

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

STYLE = """
body { margin: 0; background: var(--background); color: var(--text); font: 400 1rem/1.55 var(--sans); }
main { max-width: 56rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { margin: 0 0 0.25rem; font: 600 1.5rem/1.3 var(--serif); overflow-wrap: anywhere; }
h2 { margin: 1.75rem 0 0.5rem; font-size: 1.0625rem; overflow-wrap: anywhere; }
.facts, .ids, .reason { color: var(--text-muted); font-size: 0.875rem; }
.answer { padding: 0.9rem 1rem; border-left: 3px solid var(--highlight); background: var(--surface);
  font: 400 1.125rem/1.8 var(--serif); white-space: pre-wrap; overflow-wrap: anywhere; }
.answer a { border-radius: 0.15em; color: var(--text) !important; text-decoration: none; }
.answer a:hover, .answer a:focus-visible { outline: 2px solid var(--focus); }
section:target h2 { color: var(--accent); }
.scroll { margin-bottom: 0.75rem; overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.875rem; }
th, td { padding: 0.25rem 0.9rem 0.25rem 0; border-bottom: 1px solid var(--line); text-align: left; white-space: pre; }
th { color: var(--text-muted); font-weight: 600; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
td:first-child { font-family: var(--mono); }
.chosen td { color: var(--accent); font-weight: 600; }
.dropped td { color: var(--text-muted); }
meter { width: 7rem; }
"""


def check_page(path: Path) -> None:
    """Checks that a page can be written to `path`, before anything is generated. Raises InvalidParameterError."""
    if path.is_dir() or not path.parent.is_dir():
        raise InvalidParameterError("html", str(path), "a file in an existing directory")


def explanation_page(
    model: str, prompt: str, tokens: Sequence[tuple[int, str]], params: SamplingParams, steps: Sequence[Explanation]
) -> str:
    """Returns the text of the page: the answer with colors, and the candidates and sampler stages of each token."""
    styles = Path(ferrule.__file__).parent / "server" / "page" / "css"
    style = "\n".join([*((styles / name).read_text(encoding="utf-8") for name in STYLES), STYLE])
    title = f"How {model} continues a prompt"
    seed = "" if params.seed is None else f", seed {params.seed}"
    facts = f"{len(steps)} tokens · temperature {params.temperature:g}{seed} · ferrule {ferrule.__version__}"
    pieces = " ".join(f"<span>{_visible(text)} <small>{token}</small></span>" for token, text in tokens)
    answer = "".join(_answer_token(number, step) for number, step in enumerate(steps, start=1))
    legend = " ".join(f'<span data-certainty="{level}">{escape(label)}</span>' for level, label in _levels())
    sections = "\n".join(_section(number, step) for number, step in enumerate(steps, start=1))
    return f"""<!doctype html>
<html lang="en" data-theme="auto">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{style}
</style>
</head>
<body class="certainty">
<main>
<h1>{escape(title)}</h1>
<p class="facts">{escape(facts)}</p>
<p class="answer">{escape(prompt)}{answer}</p>
<p class="certainty-legend">Probability of a token: {legend}</p>
<p class="ids">Tokens of the prompt and their ids: {pieces}</p>
{sections}
</main>
</body>
</html>
"""


def certainty_level(probability: float | None) -> int:
    """Returns the level of certainty of a probability; None counts as the lowest probability."""
    return sum((probability or 0.0) < limit for limit in CERTAINTY_LIMITS)


def _levels() -> Iterable[tuple[int, str]]:
    return enumerate(CERTAINTY_LABELS)


def _answer_token(number: int, step: Explanation) -> str:
    chosen = _chosen(step)
    probability = None if chosen is None else chosen.probability
    hint = "not among the candidates shown" if probability is None else f"{probability:.2%}"
    level = certainty_level(probability)
    return f'<a href="#token-{number}" data-certainty="{level}" title="{hint}">{escape(step.text) or "∅"}</a>'


def _section(number: int, step: Explanation) -> str:
    rows = "\n".join(_candidate_row(candidate, step.token_id) for candidate in step.candidates)
    columns = ("token", "id", "logit", "probability", "", "after sampling", "")
    return f"""<section id="token-{number}">
<h2>Token {number}: {_visible(step.text)}</h2>
<div class="scroll" role="group" tabindex="0" aria-label="Candidates of token {number}"><table>
{_head(columns)}
<tbody>
{rows}
</tbody></table></div>
{_stages(number, step)}<p class="reason">{escape(reason(step))}</p>
</section>"""


def _candidate_row(candidate: Candidate, chosen: int) -> str:
    is_chosen = candidate.token_id == chosen
    is_dropped = candidate.dropped_by is not None
    note = "chosen" if is_chosen else f"dropped by {candidate.dropped_by}" if is_dropped else ""
    kind = "chosen" if is_chosen else "dropped" if is_dropped else ""
    after = "" if is_dropped else f"{candidate.final_probability:.2%}"
    bar = f'<meter value="{candidate.probability:.6f}" aria-hidden="true"></meter>'
    return (
        f'<tr class="{kind}"><td>{_visible(candidate.text)}</td><td class="number">{candidate.token_id}</td>'
        f'<td class="number">{candidate.logit:.3f}</td><td class="number">{candidate.probability:.2%}</td>'
        f'<td>{bar}</td><td class="number">{after}</td><td>{escape(note)}</td></tr>'
    )


def _stages(number: int, step: Explanation) -> str:
    if not step.stages:
        return ""
    chosen = _chosen(step)
    rows: list[str] = []
    for place, stage in enumerate(step.stages):
        probability = "" if chosen is None else f"{chosen.stage_probabilities[place]:.2%}"
        rows.append(
            f'<tr><td>{escape(stage.name)}</td><td class="number">{stage.tokens_left:,}</td>'
            f'<td class="number">{stage.entropy:.3f} nats</td><td class="number">{probability}</td></tr>'
        )
    columns = ("stage", "tokens left", "entropy", "probability of the token")
    body = "\n".join(rows)
    return (
        f'<div class="scroll" role="group" tabindex="0" aria-label="Sampler stages of token {number}">'
        f"<table>\n{_head(columns)}\n<tbody>\n{body}\n</tbody></table></div>\n"
    )


def _head(columns: Iterable[str]) -> str:
    cells = (f'<th scope="col">{escape(name)}</th>' if name else "<td></td>" for name in columns)
    return f"<thead><tr>{''.join(cells)}</tr></thead>"


def _chosen(step: Explanation) -> Candidate | None:
    return next((candidate for candidate in step.candidates if candidate.token_id == step.token_id), None)


def _visible(text: str) -> str:
    return escape(repr(text)[1:-1].replace(" ", "\N{OPEN BOX}"))
