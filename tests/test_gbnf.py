"""Grammars in GBNF: translation to Lark, outputs of the embedded model, and errors with line numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule import LLM, SamplingParams, StructuredOutputsParams
from ferrule._params.gbnf import MAX_DEPTH, gbnf_to_lark, is_gbnf
from ferrule.errors import InvalidParameterError

SEEDS = range(4)
JSON_OF_LLAMA_CPP = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.fixture(scope="module")
def model() -> Iterator[LLM]:
    with LLM(seed=0) as llm:
        yield llm


def outputs(model: LLM, grammar: str, max_tokens: int = 200) -> list[tuple[str, str | None]]:
    """Returns text and finish reason of one output per seed."""
    structure = StructuredOutputsParams(grammar=grammar)
    params = [SamplingParams(seed=seed, max_tokens=max_tokens, structured_outputs=structure) for seed in SEEDS]
    results = model.generate(["The answer is"] * len(params), params)
    return [(result.outputs[0].text, result.outputs[0].finish_reason) for result in results]


@pytest.mark.native
@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ('root ::= "yes" | "no"', "yes|no"),
        ('root ::= "a" | "b" |\n  "c"', "[abc]"),
        ('root ::= ( # a comment\n  "a"\n  | "b" )\n\n# the end', "[ab]"),
        ('root ::= item{3}\nitem ::= [x-z] ","', "([x-z],){3}"),
        ("root ::= [ab]{2,4}", "[ab]{2,4}"),
        ("root ::= [ab]{ 2 , 4 }", "[ab]{2,4}"),
        ('root ::= [ab]{0,2} "."', r"[ab]{0,2}\."),
        ('root ::= "a"{0} "b" "c"{0,0}', "b"),
        ('root ::= "a"{0,} "b"{1,} "."', r"a*b+\."),
        ('root ::= "a"{2}{2}', "aaaa"),
        ('root ::= "x"? "y"+ "!"', "x?y+!"),
        ('root ::= [^a-z]{3} "!"', "[^a-z]{3}!"),
        ('root ::= .{2} "!"', "(?s:.{2})!"),
        ('root ::= "a" opt "b"\nopt ::= | "-"', "a-?b"),
        (r'root ::= "\x41\u00e9\U0001F600\n\t\"\\\[\]\-"', re.escape('A\xe9\U0001f600\n\t"\\[]-')),
        (r"root ::= [\x41-\u0043]{2} [\[\]\-\\]", r"[ABC]{2}[\[\]\-\\]"),
        ("root ::= [a-]{2} [-+]", "[a-]{2}[-+]"),
        ("root ::= [ぁ-ゟ]{2}", "[ぁ-ゟ]{2}"),
        ('Root_2 ::= "a"\nroot ::= check-mate Root_2\ncheck-mate ::= "#"', "#a"),
        ('\troot ::= ("a" ("b" | "c")){2}\r\n', "(a[bc]){2}"),
    ],
)
def test_outputs_match_the_grammar(model: LLM, grammar: str, pattern: str) -> None:
    assert is_gbnf(grammar)
    for text, finish_reason in outputs(model, grammar):
        assert finish_reason == "stop"
        assert re.fullmatch(pattern, text)


@pytest.mark.native
def test_json_grammar_of_llama_cpp(model: LLM) -> None:
    complete = [text for text, reason in outputs(model, JSON_OF_LLAMA_CPP, max_tokens=400) if reason == "stop"]
    assert complete != []
    for text in complete:
        assert isinstance(json.loads(text), dict)


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=20), st.randoms(use_true_random=False))
def test_literals_keep_their_text(text: str, random: Random) -> None:
    literal = "".join(random.choice(spellings(character)) for character in text)
    lark = gbnf_to_lark(f'root ::= "{literal}"')
    assert json.loads(lark.removeprefix("start: ")) == text


def spellings(character: str) -> list[str]:
    """Returns the forms of a character in a literal."""
    code = ord(character)
    forms = [f"\\U{code:08x}"]
    if code <= 0xFFFF:
        forms.append(f"\\u{code:04X}")
    if code <= 0xFF:
        forms.append(f"\\x{code:02x}")
    special = {"\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "\\": "\\\\"}
    return [*forms, special.get(character, character)]


@pytest.mark.parametrize("grammar", ['start: "a"', "start: /::=/", 'start: "root ::= x"', ""])
def test_other_grammars_are_not_gbnf(grammar: str) -> None:
    assert not is_gbnf(grammar)


@pytest.mark.parametrize(
    ("grammar", "error"),
    [
        ('root ::= "a"{3,2}', "line 1: repetition {3,2} must have a maximum >= its minimum"),
        ('root ::= "b"\n  | "a"{,2}', "line 2: repetition {,2} must have the form {m}, {m,} or {m,n}"),
        ('root ::= "a"{two}', "line 1: repetition {two} must have the form {m}, {m,} or {m,n}"),
        ('root ::= "a"{1234567890}', "line 1: repetition {1234567890} must have the form {m}, {m,} or {m,n}"),
        ('root ::= "a"{2', "line 1: repetition without a closing brace"),
        ("root ::= *", "line 1: unexpected '*', expected the end of the rule"),
        ('# comment\nroot ::= "a', "line 2: literal without a closing quotation mark"),
        ("root ::= [a-z", "line 1: character class without a closing bracket"),
        ("root ::= []", "line 1: character class [] must have at least one character"),
        ("root ::= [z-a]", "line 1: character range z-a must be in ascending order"),
        ('root ::= "a"\n\nroot ::= "b"', "line 3: rule 'root' is defined twice"),
        ('start ::= "a"', "line 1: rule 'root' is missing"),
        ("root ::= a\na ::= b |\n  c\nc ::= a", "line 2: rule 'b' is not defined"),
        ('root ::= ("a"', "line 1: unexpected end of the grammar, expected ')'"),
        ('root ::= "a")', "line 1: unexpected ')', expected the end of the rule"),
        ('root ::= "a"\n"b"', "line 2: unexpected '\"b\"', expected a rule name"),
        ('root ::= "a"\nb', "line 2: unexpected end of the grammar, expected '::='"),
        ('root ::= "a"\nb\n::= "c"', "line 2: unexpected the end of the line, expected '::='"),
        ("root ::= $", "line 1: unexpected '$'"),
        (r'root ::= "\d"', r"line 1: unsupported escape \d; choose one of: \n \r \t"),
        (r"root ::= [\w]", r"line 1: unsupported escape \w; choose one of: \n \r \t"),
        (r'root ::= "\xZ1"', r"line 1: escape \xZ1 must have 2 hexadecimal digits"),
        (r'root ::= "\u12"', r"line 1: escape \u12 must have 4 hexadecimal digits"),
        (r'root ::= "\ud800"', r"line 1: escape \ud800 must be a Unicode character"),
        (r'root ::= "\U00110000"', r"line 1: escape \U00110000 must be a Unicode character"),
        ("root ::= <think>", "line 1: tokens such as <think> and <[1000]> are unsupported; use literals"),
        ("root ::= !<[7]>", "line 1: tokens such as !<think> and !<[1000]> are unsupported; use literals"),
        ("root ::= " + "(" * 200 + ")" * 200, f"line 1: parentheses have more than {MAX_DEPTH} levels"),
    ],
)
def test_errors_name_the_line(grammar: str, error: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        gbnf_to_lark(grammar)
    assert caught.value.field == "structured_outputs.grammar"
    assert f"a valid GBNF grammar ({error}" in str(caught.value)


def test_nesting_up_to_the_limit() -> None:
    grammar = "root ::= " + "(" * MAX_DEPTH + '"a"' + ")" * MAX_DEPTH
    assert gbnf_to_lark(grammar) == "start: " + "(" * MAX_DEPTH + '"a"' + ")" * MAX_DEPTH + "\n"
