"""Bodies have the same values, and the same errors, as `json.loads` gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule.server.request_body import read_json

SPELLINGS = (
    *(b"-0", b"-0.0", b"1e400", b"-1e400", b"5e-324", b"9007199254740993.0", b"9223372036854775808", b"1" * 4301),
    *(
        b"2.4703282292062327e-324",
        b"1.00000000000000011102230246251565404236316680908203126",
        b"179769313486231580794e288",
    ),
    *(b"NaN", b"Infinity", b"-Infinity", b"nan", b"-NaN", b"01", b"1.", b".5", b"+1", b"-", b"1_0"),
    *(b'"\\ud83d\\ude00"', b'"\\ud83d"', b'"\\udc00\\ud800"', b'"\xed\xa0\x80"', b'"\xff"', b'"\x1f"', b'"\\x41"'),
    *('"é"'.encode("utf-16"), b"\xef\xbb\xbf1", b"\xa01", b"\x0c1", b"", b" ", b"[1]x", b"[1,]", b"'a'", b"//\n1"),
    *(b'{"a":1,"a":2}', b'{"a" 1}', b"{1:2}", b"[1 2]", b"tru", b"[" * 300 + b"]" * 300, b"[" * 100_000),
)
"""Values that parsers of JSON read differently, or refuse."""
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def outcome(parse: Callable[[bytes], Any], content: bytes) -> str:
    try:
        return repr(parse(content))
    except (ValueError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("content", SPELLINGS, ids=lambda content: repr(content[:16]))
def test_unusual_spellings(content: bytes) -> None:
    assert outcome(read_json, content) == outcome(json.loads, content)


@settings(max_examples=50)
@given(VALUES, st.booleans(), st.integers(0), st.binary(max_size=2))
def test_values_and_damaged_texts(value: Any, ascii_only: bool, at: int, replacement: bytes) -> None:
    content = json.dumps(value, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    at %= len(content)
    for text in (content, content[:at] + replacement + content[at + 1 :]):
        assert outcome(read_json, text) == outcome(json.loads, text)
