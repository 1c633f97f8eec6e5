"""Run a script up to its argument parser, to check a command line without doing its work.

Usage: argument_parser.py SCRIPT [ARGUMENT ...]. Exits with 0 if the parser of the script accepts the arguments, with 2
if it does not, and with 3 if the script never parses any.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any, NoReturn

parse_args = argparse.ArgumentParser.parse_args


def parse_and_exit(self: argparse.ArgumentParser, *arguments: Any, **options: Any) -> NoReturn:
    parse_args(self, *arguments, **options)
    sys.exit(0)


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    argparse.ArgumentParser.parse_args = parse_and_exit
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit(3)
