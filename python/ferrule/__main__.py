"""`python -m ferrule` is the command `ferrule`."""

from ferrule._cli import main

if __name__ == "__main__":
    raise SystemExit(main())
