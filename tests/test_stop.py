"""Stop strings, compared with a plain search, for any split of the text."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from ferrule._text.stop import StopStrings

letters = st.text("abc", min_size=1, max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Returns the text before the stop string that ends first; the longest one if several end together."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def pieces(text: str, cuts: list[int]) -> list[str]:
    """Splits a text at the given positions."""
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(bounds)]


@given(text=st.text("abc", max_size=30), stops=st.lists(letters, max_size=4), cuts=st.lists(st.integers(0, 100)))
@example(text="ababc", stops=["abc", "b"], cuts=[1, 2, 3])
@example(text="aabaabab", stops=["aabab"], cuts=[3, 5])
def test_stop_strings_equal_plain_search(text: str, stops: list[str], cuts: list[int]) -> None:
    watch = StopStrings(stops)
    found = "".join([watch.feed(piece) for piece in pieces(text, cuts)])
    found += watch.flush()
    assert (found, watch.matched) == naive(text, stops)


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(letters, min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 100)),
)
def test_only_possible_stop_string_prefixes_are_held_back(text: str, stops: list[str], cuts: list[int]) -> None:
    watch, seen, out = StopStrings(stops), "", ""
    for piece in pieces(text, cuts):
        seen += piece
        out += watch.feed(piece)
        if watch.matched is not None:
            break
        prefixes = {stop[:length] for stop in stops for length in range(len(stop))}
        held = max((prefix for prefix in prefixes if seen.endswith(prefix)), key=len)
        assert out + held == seen


def test_include_stop_string() -> None:
    watch = StopStrings(["END"], include=True)
    assert watch.feed("the E") + watch.feed("ND of it") == "the END"
    assert watch.matched == "END"
    assert watch.feed("more") == ""


def test_without_stop_strings_nothing_is_held_back() -> None:
    watch = StopStrings([])
    assert [watch.feed("a"), watch.feed("b"), watch.flush()] == ["a", "b", ""]
