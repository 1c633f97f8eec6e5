#!/usr/bin/env python
"""Measure the time to first token with packed weights, and the memory of packing them.

Packs MODEL into OUTPUT, unless OUTPUT exists, and then starts one process after the other. Each measures the time
from `import ferrule` to a loaded model and to the first token of a prompt, then the same prompt on the warm engine,
and decode. `start_seconds` is the time of the first token without that of the warm prompt, `start_cpu_seconds` its
CPU time, which depends less on other load. The page cache is warm from the second start on; `--cold` drops the file
from it before each start. MODEL is the directory of a checkpoint, or the name of a shape; random codes of a shape
need no search, so their packing time is not representative. Anonymous memory is that of the process (`RssAnon`,
Linux), sampled every 20 ms; `cpu_seconds` of packing include all threads.

    python benches/startup.py llama-8b /tmp/llama-8b-int4 --format int4
    python benches/random_checkpoint.py llama-1b /tmp/llama-1b
    python benches/startup.py /tmp/llama-1b /tmp/llama-1b-int4 --format int4
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from random_checkpoint import write_tokenizer

import ferrule
from ferrule import _native
from ferrule._loading import PACKED_METHOD, WEIGHTS, read_model_files
from ferrule._loading.shapes import find_shape, shape_names
from ferrule._params.options import EngineOptions

START = """
import json, sys, time
begin = time.perf_counter()
import ferrule
from ferrule import LLM, SamplingParams

model, prompt, gen, mmap = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "mmap"
llm = LLM(model, mmap=mmap, enable_prefix_caching=False)
loaded = time.perf_counter()
one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
ids = {"prompt_token_ids": list(range(300, 300 + prompt))}
llm.generate(ids, one)
first, cpu = time.perf_counter(), time.process_time()
llm.generate(ids, one)
warm, warm_cpu = time.perf_counter() - first, time.process_time() - cpu
decode = None
if gen:
    many = SamplingParams(max_tokens=gen + 1, temperature=0, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(ids, many)
    decode = gen / (time.perf_counter() - start - warm)
status = open("/proc/self/status").read()
print(json.dumps({
    "load_seconds": loaded - begin,
    "first_token_seconds": first - begin,
    "prefill_seconds": warm,
    "start_seconds": first - begin - warm,
    "start_cpu_seconds": cpu - warm_cpu,
    "decode_tokens_per_second": decode,
    "anonymous_bytes": int(status.split("RssAnon:")[1].split()[0]) * 1024,
    "weight_bytes": llm.info()["weight_bytes"],
    "mapped_bytes": llm.info()["mapped_bytes"],
}))
"""


def anonymous_bytes() -> int:
    """Returns the anonymous memory of this process."""
    [kilobytes] = re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024


def write_random(shape: str, output: Path, kind: str) -> None:
    """Writes random weights in a well-known shape as `ferrule.quantize` writes a model's."""
    files = read_model_files(find_shape(shape))
    output.mkdir(parents=True)
    spec, options = files.spec_json, EngineOptions(quantization=kind).to_json()
    _native.pack(spec, None, options, str(output / WEIGHTS), {"model": shape})
    config = json.loads((files.path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": PACKED_METHOD, "format": kind}
    (output / "config.json").write_text(json.dumps(config))
    write_tokenizer(config, output)


def pack(model: str, output: Path, kind: str) -> dict[str, float]:
    """Packs a model, and returns the time and the peak of anonymous memory."""
    bare = anonymous_bytes()
    peak, done = bare, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin, cpu = time.perf_counter(), time.process_time()
    try:
        if model in shape_names():
            write_random(model, output, kind)
        else:
            ferrule.quantize(model, output, format=kind)
    finally:
        done.set()
        watcher.join()
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    return {
        "seconds": round(time.perf_counter() - begin, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "packed_bytes": size,
        "peak_anonymous_bytes": peak - bare,
    }


def start(model: Path, prompt: int, gen: int, *, mmap: bool, cold: bool) -> dict[str, float]:
    """Measures one start in a new process."""
    if cold:
        for path in model.glob("*.safetensors"):
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)
    command = [sys.executable, "-c", START, str(model), str(prompt), str(gen), "mmap" if mmap else "read"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 -- our own script
    return {name: round(value, 3) for name, value in json.loads(done.stdout).items() if value is not None}


def main() -> None:
    """Measure and print a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a checkpoint's directory, or the name of a shape")
    parser.add_argument("output", type=Path, help="where it is packed, or was")
    parser.add_argument("--format", default="int4")
    parser.add_argument("--prompt", type=int, default=16, help="tokens")
    parser.add_argument("--gen", type=int, default=32, help="tokens to decode; 0 for none")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--no-mmap", dest="mmap", action="store_false")
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    record: dict[str, object] = {"model": Path(options.model).name, "format": options.format, "mmap": options.mmap}
    if not options.output.exists():
        record["packing"] = pack(options.model, options.output, options.format)
    starts = [
        start(options.output, options.prompt, options.gen, mmap=options.mmap, cold=options.cold)
        for _ in range(options.repeat)
    ]
    record["starts"] = starts
    record["medians"] = {name: statistics.median(each[name] for each in starts) for name in starts[0]}
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
