"""Derives the markers around reasoning and around the answer."""

from __future__ import annotations

import re

from ferrule._text.derivation.marks import first_mark, mark, shared_prefix, shared_suffix
from ferrule._text.derivation.probes import ANSWER, REASONING, Probes
from ferrule._text.parsers.state import Thought

_TAG = re.compile(r"<[^<>\s]+>$|\[[^\[\]\s]+\]$")
_TAGS = re.compile(r"(?:<[^<>\s]+>|\[[^\[\]\s]+\]|\w)+$")
MAX_MARKER = 100
"""Maximum number of characters of a marker at the end of a prompt."""


def derive_reasoning(probes: Probes) -> Thought | None:
    """Returns the markers of reasoning; None if the template does not render reasoning or writes no markers."""
    turn = probes.reasoned_answer or probes.reasoned_call
    before, _, after = turn.partition(REASONING)
    gaps = [after[: after.index(ANSWER)]] if ANSWER in after else []
    called = mark(probes.reasoned_call.partition(REASONING)[2], named_ids=probes.named_ids)[0]
    if called:
        gaps.append(called[: max(first_mark(called), 0)])
    if not gaps:
        return None
    end = shared_prefix(*gaps) if len(gaps) == 2 else gaps[0]
    end = (end.strip() or gaps[0].strip()).strip()
    begin = before.strip() or _opened(probes.header, end)
    return Thought(begin, end, anywhere=False) if begin and end else None


def answer_marks(probes: Probes, thought: Thought | None) -> tuple[str, ...]:
    """Returns the markers around the answer, without those of reasoning and without the end of the turn."""
    found: list[str] = []
    for turn in (probes.answer, probes.reasoned_answer):
        before, _, after = turn.partition(ANSWER)
        if thought is not None and thought.end in before:
            before = before.rpartition(thought.end)[2]
        elif REASONING in before:
            continue
        found.append(before.strip())
        calls = probes.call or after
        turn_end = shared_suffix(after, calls) if probes.call else after
        found.append(after[: len(after) - len(turn_end)].strip())
        if probes.call and re.search(r"\s|>\w", turn_end.strip()):  # more than one special token
            found.append(turn_end[: turn_end.rstrip().rfind("<")].strip())
    return tuple(dict.fromkeys(each for each in found if re.search(r"[<\[|]", each)))


def _opened(header: str, end: str) -> str:
    """Returns the marker of reasoning at the end of a prompt that opens it."""
    text = header.rstrip()[-MAX_MARKER:]
    found = (_TAG if _TAG.fullmatch(end) else _TAGS).search(text)
    if found is None:
        return ""
    tags = found.group()
    return tags[tags.find("<") :] if "<" in tags else tags
