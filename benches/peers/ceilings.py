"""The machine's ceilings, as ferrule probes them: answers each line with the best of a few passes.

`python ceilings.py THREADS`
"""

from __future__ import annotations

import json
import sys

from ferrule import _native

PASSES = 3


def main() -> None:
    """Serve until the pipe closes."""
    machine = _native.Ceilings(int(sys.argv[1]))
    machine.measure()  # the first pass finds how the memory is read fastest
    print(json.dumps({}), flush=True)
    for _ in sys.stdin:
        passes = [machine.measure() for _ in range(PASSES)]
        read, int8, f32, adds = (max(each) for each in zip(*passes, strict=True))
        print(json.dumps({"read": read, "int8": int8, "f32": f32, "adds": adds}), flush=True)


if __name__ == "__main__":
    main()
