"""Writes the cases of a group: `python main.py GROUP OUT [CASE...]`."""

import argparse
from pathlib import Path
from zlib import crc32

import encoders
import torch
from transformers.utils import logging

GROUPS = {"encoders": (encoders.CASES, encoders.make)}


def main() -> None:
    """A case's seed is its name's checksum, so that one can be made again alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("out", type=Path)
    parser.add_argument("case", nargs="*")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    cases, make = GROUPS[arguments.group]
    for name in cases:
        if not arguments.case or name in arguments.case:
            make(name, crc32(name.encode()), arguments.out / name)
            size = sum(file.stat().st_size for file in (arguments.out / name).rglob("*") if file.is_file())
            print(f"{name}: {size // 1024} KB", flush=True)


if __name__ == "__main__":
    main()
