"""Python literals: the same values as Python's parser, and hostile text."""

from __future__ import annotations

import ast
import json
import time
from contextlib import nullcontext

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ferrule._text.parsers.literals import MAX_DEPTH, read_literal, whole_characters
from ferrule._text.parsers.tools import json_of_literal, json_of_text

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=15,
)


@given(value=values)
@example(value={"'": ['"', "\\", "\n\t\0", "é😀"]})
@example(value=[1e300, -0.0, 10**30])
def test_repr_round_trip(value: object) -> None:
    assert read_literal(repr(value)) == value
    assert json.loads(json_of_literal(repr(value), frozenset())) == value


@given(text=st.text("()[]{}'\"\\,:.0123xeE+-_ \nTrueNoneabrf", max_size=20))
def test_arbitrary_text_raises_only_value_error(text: str) -> None:
    """Values agree with Python's parser where Python parses the text."""
    try:
        value = read_literal(text)
    except ValueError:
        return
    assert json.loads(json.dumps(value)) == value


@pytest.mark.parametrize(
    "text",
    [
        *("'a' \"b\"", "'''x'y'''", '"""a\nb"""', r"'\x41\u00e9\U0001f600\101\'\"\a'", r"r'\n'", "'a\\\nb'", r"'\d'"),
        *("1_000", "0x1F", "0b11", ".5", "5.", "1e-3", "-1", "+2.5", "()", "(1)", "[1, 2,]", "[[], [{}]]", "{'a': 1,}"),
    ],
)
def test_same_value_as_python(text: str) -> None:
    with pytest.warns(match="invalid escape") if "\\d" in text else nullcontext():
        expected = ast.literal_eval(text)
    assert read_literal(text) == (list(expected) if isinstance(expected, tuple) else expected)


def test_json_words_keys_and_surrogates() -> None:
    assert read_literal("[true, false, null]") == [True, False, None]
    assert read_literal("{1: 2, None: 3, True: 4, 1.5: 5}") == {"1": 2, "null": 3, "true": 4, "1.5": 5}
    assert read_literal(r"'\ud83d\ude00 \ud83d'") == "😀 \N{REPLACEMENT CHARACTER}"
    assert whole_characters("a\ud83d\ude00") == "a😀"


@pytest.mark.parametrize(
    "text",
    [
        *("", "a", "f(1)", "1 2", "[1 2]", "[,]", "{1}", "{1: }", "{[]: 1}", "{'a' 1}", "(", "[", "'", "'''a''", "1+1"),
        *("007", "1e999", "-1e999", "nan", "1__0", "0x", "1j", "--1", "f'x'", "b'x'", "9" * 5000, "*", "\\"),
        *("9" * 700, "0x" + "f" * 4000, "[-0x" + "f" * 4000 + "]", "{0x" + "f" * 4000 + ": 1}"),
        *("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "[" * 100_000, "{'a':" * 100_000, "-" * 100_000),
    ],
)
def test_other_text_is_rejected(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # its message is nobody's business
        read_literal(text)
    assert json.loads(json_of_literal(text, frozenset())) == text.strip()


def test_parsing_takes_linear_time() -> None:
    start = time.process_time()
    assert len(str(read_literal('"' + "ab\\n" * 250_000 + '"'))) == 750_000
    assert read_literal("[" + "1," * 300_000 + "]") == [1] * 300_000
    with pytest.raises(ValueError):  # noqa: PT011
        read_literal('"""' + 'a"' * 500_000)
    assert time.process_time() - start < 5 * 5, "the promise is 5 s"


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("1", {"integer"}, 1),
        ("1", {"number"}, 1),
        ("1", {"string", "integer"}, 1),
        ("1", {"string"}, "1"),
        ("1", set(), "1"),
        ("1.5", {"integer"}, "1.5"),
        ("1e400", {"number"}, "1e400"),
        ('"a"', {"string"}, '"a"'),
        ('"a"', {"null", "string"}, "a"),
        ("[1", {"array"}, "[1"),
        ("{'a': [1, 2]}", {"object"}, {"a": [1, 2]}),
        ("[" * 100_000, {"array"}, "[" * 100_000),
        ("[0x" + "f" * 4000 + "]", {"array"}, "[0x" + "f" * 4000 + "]"),
    ],
)
def test_bare_text_of_a_declared_type(text: str, types: set[str], value: object) -> None:
    found = json_of_text(text, frozenset(types))
    if text == "1e400":
        assert found == text, "JSON has no limit to its numbers"
    else:
        assert json.loads(found) == value
