"""Runs the command line: `python -m ferrule` is the same as `ferrule`."""

from ferrule._cli import main

if __name__ == "__main__":
    raise SystemExit(main())
