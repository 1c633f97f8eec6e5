"""Writes the cases of a group: `python main.py GROUP OUT [CASE...]`."""

import argparse
from pathlib import Path
from types import ModuleType
from zlib import crc32

import dense
import encoders
import families
import hybrids
import lora
import moe
import torch
import wrapped
from reference import UnstableError
from transformers.utils import logging

GROUPS = {
    "adapters": lora,
    "dense": dense,
    "encoders": encoders,
    "families": families,
    "hybrids": hybrids,
    "moe": moe,
    "wrapped": wrapped,
}
ATTEMPTS = 50


def main() -> None:
    """Makes the cases; the first seed of each is its name's checksum, so that single cases are reproducible."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("out", type=Path)
    parser.add_argument("case", nargs="*")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    group = GROUPS[arguments.group]
    for name in arguments.case or group.CASES:
        make(group, name, arguments.out / name)
        size = sum(file.stat().st_size for file in (arguments.out / name).rglob("*") if file.is_file())
        print(f"{name}: {size // 1024} KB", flush=True)


def make(group: ModuleType, name: str, out: Path) -> None:
    """Makes a case with the first random weights whose results do not depend on rounding."""
    first = crc32(name.encode())
    for seed in range(first, first + ATTEMPTS):
        try:
            return group.make(name, seed, out)
        except UnstableError as error:
            print(f"{name}: seed {seed}: {error}", flush=True)
    raise SystemExit(f"{name}: none of {ATTEMPTS} seeds will do")


if __name__ == "__main__":
    main()
