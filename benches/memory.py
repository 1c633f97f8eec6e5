#!/usr/bin/env python
"""Measure the memory of a model beyond its packed weights, keys and values.

Anonymous memory of this process (`RssAnon`, Linux), above what a bare `import ferrule` takes: after loading random
weights in the shape of a well-known model, and after a prompt and some tokens.

    python benches/memory.py --shape llama-1b --quantization int4 --prompt 512 --gen 64
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import ferrule


def anonymous_bytes() -> int:
    """Returns the anonymous memory of this process."""
    status = Path("/proc/self/status").read_text()
    [kilobytes] = re.findall(r"RssAnon:\s+(\d+) kB", status)
    return int(kilobytes) * 1024


def main() -> None:
    """Measure and print a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--gen", type=int, default=64)
    options = parser.parse_args()

    bare = anonymous_bytes()
    llm = ferrule.LLM.from_shape(
        options.shape, quantization=options.quantization, kv_cache_dtype=options.kv_cache_dtype
    )
    loaded = anonymous_bytes() - bare
    params = ferrule.SamplingParams(max_tokens=options.gen, ignore_eos=True, temperature=0)
    llm.generate({"prompt_token_ids": list(range(options.prompt))}, params)
    used = anonymous_bytes() - bare
    info = llm.info()
    cached = (options.prompt + options.gen) * info["kv_bytes_per_token"]
    record = {
        "shape": options.shape,
        "quantization": info["quantization"],
        "kv_cache_dtype": info["kv_cache_dtype"],
        "weight_bytes": info["weight_bytes"],
        "kv_bytes": cached,
        "loaded_bytes": loaded,
        "used_bytes": used,
        "used_over_weights_and_kv": round(used / (info["weight_bytes"] + cached), 4),
    }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
