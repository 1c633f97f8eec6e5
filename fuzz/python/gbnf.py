"""GBNF grammars: any text becomes a Lark grammar, or is refused with a typed error."""

import contextlib
import sys

import atheris

with atheris.instrument_imports(include=["ferrule._params"]):
    from ferrule._params.gbnf import gbnf_to_lark
    from ferrule.errors import InvalidParameterError


def translate(data: bytes) -> None:
    """Translates a grammar."""
    with contextlib.suppress(InvalidParameterError):
        gbnf_to_lark(data.decode(errors="replace"))


atheris.Setup(sys.argv, translate)
atheris.Fuzz()
