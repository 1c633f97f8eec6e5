#!/usr/bin/env python3
"""Check the text of the project against its language rules.

Usage: check_prose.py [PATH ...]

Reads documentation, docstrings, rustdoc, comments, and the string literals that become help texts, messages and log
lines. Two rules concern summary lines (the first sentence of a docstring or of a rustdoc block), which editors and
search results show without their surroundings; the others are words and phrases with a plainer equivalent.

Prints `path:line: rule: text; suggestion` for each finding. Exits with 1 if there are findings, with 2 if a path does
not exist. Without a PATH it checks everything that git tracks.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

ROOT = Path(__file__).resolve().parents[1]

SKIPPED = (
    "benches/record/",
    "python/ferrule/server/page/vendor/",
    "python/ferrule/models/",
    "tests/golden/",
    "tools/train_tiny/",
)
"""Records, vendored files, test data, and the training text of the embedded model."""

QUOTING = ("tools/check_prose.py", "tests/test_prose.py")
"""Files that contain the phrases because they define or test the rules."""


class Text(NamedTuple):
    """A piece of text: a comment, a docstring, a string literal or a paragraph."""

    line: int
    kind: Literal["summary", "heading", "prose", "string"]
    text: str


class Finding(NamedTuple):
    """A violation of a rule."""

    path: str
    line: int
    rule: str
    text: str
    suggestion: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text!r}; {self.suggestion}"


# Summary lines.

LEANING = re.compile(r"(?:Of|Those|Its|Their|Theirs|Whose|Than|And|But|Or|Nor|Such|It|They|Them)\b")
"""Words that refer to another item, so that the line does not stand alone."""

CLAUSE = re.compile(r"(?:How (?!to\b)|What\b|Who\b|Whom\b|Why\b|Which\b|Where\b(?![^.]*,))")
"""Words that begin a subordinate clause in place of a noun phrase."""

PREPOSITION = re.compile(
    r"(?:As|From|To|By|With|Without|Beside|Below|Above|Between|After|Before|For|In|On|At|Within|Into|Among|Until)\b"
    r"(?![^.]*[,:])"
)
"""Prepositions; a main clause may follow after a comma."""

POSSESSIVE = re.compile(r"(?:\S+ ){0,4}\S+['\N{RIGHT SINGLE QUOTATION MARK}]s\.?$")

HEADING = re.compile(r"(?:Of|Those|Its|Their|Whose|And|But|What|Who|Where|Which|That)\b")

SUMMARY_RULES: tuple[tuple[str, re.Pattern[str], str], ...] = (
    ("leaning-summary", LEANING, "name the thing itself: a noun phrase, an imperative, or subject and verb"),
    ("clause-summary", CLAUSE, "start with a noun or a verb ('Number of ...', 'Returns ...', 'Reason that ...')"),
    ("fragment-summary", PREPOSITION, "start with the noun or the verb that the preposition belongs to"),
    ("fragment-summary", POSSESSIVE, "write the noun that the possessive belongs to"),
)

# Words and phrases. The pattern is matched without regard to case; code in backticks is not looked at.

_THINGS = (
    "name|list|number|string|text|object|directory|folder|file|gguf|json|model|call|token|whole|valid|package|path|repo"
)
_CLAUSE_END = r"(?= *(?:[.,;:)]|$))"

PHRASES: tuple[tuple[str, str], ...] = (
    (rf"\b(?:is|are|was|were|be) no (?:{_THINGS})s?\b", "write 'is not a ...'"),
    (r"\bbut for\b", "write 'except'"),
    (r"\bso (?:long|large|many|few|much|small|short|deep) an?\b", "write 'such a long ...' or name the limit"),
    (r"\b(?:that is (?-i:none)|which (?:is|are) (?-i:none)|(?-i:none) is)\b", "say what was found and what is allowed"),
    (r"\b(?:than|as(?: many| much)?) may\b(?! be\b)", "state the limit"),
    (rf"\bcannot be\b{_CLAUSE_END}", "write 'is invalid', 'is unsupported' or 'is impossible'"),
    (rf"\b(?:has|have) not\b{_CLAUSE_END}", "write 'does not have ...'"),
    (r"\b(?:come|comes|came) about\b", "write 'is created' or 'happens'"),
    (rf"\bof (?:its|their) own\b{_CLAUSE_END}", "write 'its own ...' or 'separate'"),
    (r"\b(?:goes?|went) by\b(?! (?:the )?name)", "write 'uses' or 'is identified by'"),
    (r"\b(?:tells?|told) of\b|\b(?:is|are|was|were|been|be) told\b", "write 'reports', 'returns' or 'describes'"),
    (
        r"\b(?:engine|request|sequence|cache|it|they|which|that|who|must|to) parts? with\b",
        "write 'evict', 'preempt' or 'free'",
    ),
    (
        r"\bwhat is there\b|(?<!so )\bthat there (?:is|are)\b(?! (?:an?|no|one|two|more|enough)\b)",
        "write 'exists' or 'available'",
    ),
    (r"\b(?:comes?|came|made|makes?) true\b", "write 'is accepted'"),
    (r"\b(?:is|are|was|were) asked for\b", "write 'is requested'"),
    (r"\b(?:is|are|was|were) wanted\b", "write 'is requested' or 'is needed'"),
    (r"\bsays? so\b", "write what it says"),
    (r"\bin reach\b", "write 'available' or 'found'"),
    (r"\blest\b", "write 'so that ... not'"),
    (r"\bwhatever else\b", "name the other cases"),
    (r"\b(?:makes?|made|making) (?:way|room)\b", "write 'free', 'evict' or 'preempt'"),
    (r"\bdisown\w*", "write 'invalidate' or 'release'"),
    (r"\btwins?\b", "write 'parent', 'forked sequence' or 'counterpart'"),
    (r"\blets? through\b", "write 'gate' or 'allow'"),
    (r"\bcomes? to (?:its|their|an) end\b", "write 'finishes'"),
    (r"\bof which there (?:is|are)\b", "write 'the number of ...'"),
    (r"\bsuch an? one\b", "name the thing"),
    (r"\banew\b", "write 'again'"),
    (r"\bguess(?:es|ed)?\b", "write 'speculative token', 'draft' or 'estimate'"),
    (r"\bmixtures?\b(?![ -]of[ -]experts)", "write 'mixture of experts' or 'MoE'"),
    (r"\bmoments\b", "write 'Hessian' (GPTQ)"),
    (r"\bturned\b(?! (?:on|off|into|out|down|up|to)\b)", "write 'rotated' (rotary embedding)"),
    (r"\bknows? (?:no|nothing)\b", "write 'does not support'"),
    (r"\b(?:hither|whither|thereof|therein|hitherto|whence|heretofore|wherein)\b", "use a current word"),
)
_PHRASES = tuple((re.compile(pattern, re.IGNORECASE), suggestion) for pattern, suggestion in PHRASES)

NAMES = re.compile(
    r"\b(?:def|class|fn|struct|enum|trait|mod|const|static|type|function|let)\s+"
    r"(?=\w*(?<![a-z])(?:disown(?:s|ed)?|twins?|told|make_way|take_over|part_with|let_through|c[oa]me_true|turned)"
    r"(?![a-z]))(\w+)"
)
"""Definitions whose names have words that the glossary replaces."""


def python_texts(source: str) -> Iterator[Text]:
    """Docstrings, comments and string literals of a Python file."""
    tree = ast.parse(source)
    documented = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for before, statement in zip([None, *node.body], node.body, strict=False):
                if (
                    isinstance(statement, ast.Expr)
                    and isinstance(statement.value, ast.Constant)
                    and isinstance(statement.value.value, str)
                    and isinstance(before, ast.Assign | ast.AnnAssign | None)
                ):
                    documented.add(id(statement.value))
                    yield Text(statement.lineno, "summary", first_sentence(statement.value.value))
                    yield Text(statement.lineno, "prose", statement.value.value)
    in_templates = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in documented | in_templates and " " in text:
                yield Text(node.lineno, "string", text)
            case ast.JoinedStr(values=values):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in values]
                yield Text(node.lineno, "string", "".join(parts))
            case ast.keyword(arg="help", value=ast.Constant(value=str(text))):
                yield Text(node.value.lineno, "summary", first_sentence(text))
            case _:
                pass
    comments = (
        token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.COMMENT
    )
    yield from joined((token.start[0], token.string.lstrip("#: ")) for token in comments)


LEXEME = re.compile(
    r"""(?P<doc>//[/!][^\n]*)|(?P<line>//[^\n]*)|(?P<block>/\*.*?\*/)"""
    r"""|(?:\b[bc]?r(?P<hashes>\#*)"(?P<raw>.*?)"(?P=hashes))|(?P<string>"(?:\\.|[^"\\])*")|'(?:\\[^'\n]+|[^'\\\n])'""",
    re.DOTALL,
)


def rust_texts(source: str) -> Iterator[Text]:
    """Rustdoc, comments and string literals of a Rust or JavaScript file."""
    docs: list[tuple[int, str]] = []
    comments: list[tuple[int, str]] = []
    line = 1
    end = 0
    for lexeme in LEXEME.finditer(source):
        line += source.count("\n", end, lexeme.start())
        end = lexeme.start()
        if lexeme["doc"]:
            docs.append((line, lexeme["doc"][3:].removeprefix(" ")))
        elif lexeme["line"]:
            comments.append((line, lexeme["line"].lstrip("/ ")))
        elif lexeme["block"]:
            comments.append((line, re.sub(r"(?m)^\s*\*? ?", "", lexeme["block"].strip("/* "))))
        elif (text := lexeme["raw"] or (lexeme["string"] or "")[1:-1]) and " " in text:
            yield Text(line, "string", re.sub(r"\\\n\s*", "", text))
    for block in joined(docs):
        yield Text(block.line, "summary", first_sentence(block.text))
        yield Text(block.line, "prose", without_fences(block.text))
    yield from joined(comments)


def joined(lines: Iterator[tuple[int, str]] | list[tuple[int, str]]) -> Iterator[Text]:
    """Joins comments on neighbouring lines into one text."""
    block: list[str] = []
    first = 0
    for line, text in lines:
        if block and line != first + len(block):
            yield Text(first, "prose", "\n".join(block))
            block = []
        if not block:
            first = line
        block.append(text)
    if block:
        yield Text(first, "prose", "\n".join(block))


def markdown_texts(source: str) -> Iterator[Text]:
    """Headings, paragraphs and table rows of a Markdown file, without code blocks."""
    paragraph: list[tuple[int, str]] = []
    for number, line in enumerate(without_fences(source).split("\n"), 1):
        if heading := re.match(r"#+ (.*)", line):
            yield Text(number, "heading", heading[1])
        if line.strip() and not line.startswith("|"):
            paragraph.append((number, line))
            continue
        yield from joined(paragraph)
        paragraph = []
        if line.strip():
            yield Text(number, "prose", line)
    yield from joined(paragraph)


def script_texts(source: str) -> Iterator[Text]:
    """Comments of a shell script, a Makefile or a TOML file."""
    yield from joined(
        [
            (number, found[1])
            for number, line in enumerate(source.split("\n"), 1)
            if (found := re.search(r"#+ ?(.*)", line))
        ]
    )


def without_fences(text: str) -> str:
    """Blanks fenced code blocks, and keeps the number of lines."""
    return re.sub(r"(?ms)^ *```.*?^ *```", lambda found: "\n" * found[0].count("\n"), text)


def first_sentence(text: str) -> str:
    """Returns the summary line of a docstring or rustdoc block."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", paragraph)[0]


READERS = {
    ".py": python_texts,
    ".pyi": python_texts,
    ".rs": rust_texts,
    ".js": rust_texts,
    ".md": markdown_texts,
    ".toml": script_texts,
    "": script_texts,
}
"""Reader of each kind of file, by suffix; files of other kinds have no text to check."""


def check_text(path: str, text: Text) -> Iterator[Finding]:
    """Applies the rules to one text."""
    if text.kind == "summary":
        for rule, pattern, suggestion in SUMMARY_RULES:
            if pattern.match(text.text):
                yield Finding(path, text.line, rule, text.text[:80], suggestion)
                break
        return
    if text.kind == "heading":
        if HEADING.match(text.text):
            yield Finding(path, text.line, "heading", text.text[:80], "use the words that a reader searches for")
        return
    # Code is of another language; joined lines let a phrase span a line break.
    prose = re.sub(r"``.*?``|`[^`]*`", lambda found: "`" + "\n" * found[0].count("\n") + "`", text.text)
    flat = prose.replace("\n", " ")
    for pattern, suggestion in _PHRASES:
        for found in pattern.finditer(flat):
            line = text.line + prose.count("\n", 0, found.start())
            yield Finding(path, line, "phrase", found[0], suggestion)


def check_file(path: Path, name: str) -> Iterator[Finding]:
    """Checks one file, whose path in findings is `name`."""
    source = path.read_text(encoding="utf-8")
    for text in READERS[path.suffix](source):
        # Strings in tests are inputs, or messages that are checked where they are written.
        if not (text.kind == "string" and name.startswith("tests/")):
            yield from check_text(name, text)
    if path.suffix in (".py", ".pyi", ".rs", ".js"):
        for number, line in enumerate(source.split("\n"), 1):
            for found in NAMES.finditer(re.sub(r"//.*|#.*", "", line)):
                yield Finding(name, number, "name", found[1], "use the glossary's term")


def tracked(paths: list[Path]) -> Iterator[Path]:
    """Files below `paths` that git tracks and that have text."""
    listed = subprocess.run(  # noqa: S603
        ["git", "ls-files", "-z", "--", *map(str, paths)],  # noqa: S607
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        scripted = path.suffix or path.name == "Makefile" or name.startswith(("scripts/", ".ci/"))
        if (
            path.suffix in READERS
            and scripted
            and path.is_file()
            and not name.startswith(SKIPPED)
            and name not in QUOTING
        ):
            yield path


def main(arguments: list[str]) -> int:
    """Prints the findings and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="Files or folders to check.")
    paths: list[Path] = [path.absolute() for path in parser.parse_args(arguments).paths] or [ROOT]
    for path in paths:
        if not path.exists():
            parser.error(f"{path} does not exist")
    findings = [finding for path in tracked(paths) for finding in check_file(path, str(path.relative_to(ROOT)))]
    for finding in dict.fromkeys(findings):
        print(finding)
    print(f"{len(findings)} findings", file=sys.stderr)
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
