#!/usr/bin/env python3
"""Compare ferrule with its peers on the same random weights: speed, bytes, shares of the machine's limits.

    python benches/peers/compare.py --shape llama-1b ferrule:int4 llama.cpp-avx512:Q4_0

Every contender stays loaded in a separate process. A round measures each of them once, and the ceilings before each.
Each round has another prompt, so that prefix caches have no effect.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shlex
import struct
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from adapters.interface import EXPERT_COUNTS, Job, Loaded, Timing
from child import Child, ChildError
from registry import PEERS, Contender
from report import Ceilings, Measurement, Round, Workload, record, rows, steady_rounds, table

HERE = Path(__file__).resolve().parent
WORK = HERE / ".work"
"""Directory of environments, checkpoints and their conversions, which git ignores."""
EXPERTS = re.compile(r"\.experts\.\d|\.block_sparse_moe\.(in|out)put_linear")
"""Weights of experts in the names of checkpoints."""


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contenders", nargs="+", help=f"PEER:FORMAT[/KV] with PEER one of {', '.join(PEERS)}")
    parser.add_argument("--shape", default="llama-1b", help="of the weights: a name that `ferrule bench` knows")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--gen", type=int, default=64, help="tokens after the first")
    parser.add_argument("--batch", type=int, default=1, help="sequences at once")
    parser.add_argument("--repeat", type=int, default=7, help="rounds; medians are shown")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ferrule-python", type=Path, help="the Python that has ferrule; by default as installed")
    parser.add_argument("--out", type=Path, help="write the record there, as JSON")
    return parser.parse_args()


def environment_python(environment: str, ferrule: Path | None) -> Path:
    """Return the interpreter of an environment."""
    if environment == "ferrule" and ferrule is not None:
        return ferrule
    python = WORK / environment / "bin" / "python"
    if not python.exists():
        raise FileNotFoundError(f"{environment} is not installed: run benches/peers/install {environment}")
    return python


def checkpoint(shape: str, python: Path) -> Path:
    """Return the checkpoint of a shape, which is created unless it exists."""
    made = WORK / shape / "checkpoint"
    if not (made / "config.json").exists():  # written last
        command = [python, HERE.parent / "random_checkpoint.py", shape, made]
        subprocess.run(command, check=True)  # noqa: S603 -- our own script
    return made


def layer_parameters(made: Path) -> int:
    """Return the number of weights of the layers' projections that a token uses, so only its own experts."""
    with (made / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    config = json.loads((made / "config.json").read_text())
    experts = max(config.get(name) or 1 for name in EXPERT_COUNTS)
    chosen = config.get("num_experts_per_tok") or 1
    # A kernel of a convolution has one column per tap and channel: [channels, 1, taps].
    layers = {
        name: math.prod(entry["shape"])
        for name, entry in header.items()
        if re.search(r"\.layers\.|per_layer_model", name) and entry["shape"][1:] and entry["shape"][1] > 1
    }
    of_experts = sum(size for name, size in layers.items() if EXPERTS.search(name))
    return sum(layers.values()) - of_experts // experts * (experts - chosen)


def measure(child: Child, machine: Child, prompts: list[list[int]], gen: int) -> Measurement:
    """Measure the ceilings and then a contender."""
    ceilings = Ceilings(**machine.ask())
    return Measurement(Timing(**child.ask(prompts=prompts, gen=gen)), ceilings)


def main() -> None:
    """Load all contenders, measure them in turns, and report."""
    options = arguments()
    contenders = [Contender.parse(text) for text in options.contenders]
    ferrule = environment_python("ferrule", options.ferrule_python)
    pythons = [environment_python(PEERS[each.peer].environment, ferrule) for each in contenders]
    made = checkpoint(options.shape, ferrule)
    workload = Workload(
        options.shape, layer_parameters(made), options.prompt, options.gen, options.threads, options.batch
    )
    vocabulary = json.loads((made / "config.json").read_text())["vocab_size"]
    logs = WORK / "logs"
    logs.mkdir(exist_ok=True)
    with ExitStack() as stack:
        children: list[Child] = []
        for contender, python in zip(contenders, pythons, strict=True):
            print(f"loading {contender}", file=sys.stderr)
            peer = PEERS[contender.peer]
            job = Job(
                checkpoint=made,
                work=WORK / options.shape,
                format=contender.format,
                kv=contender.kv,
                threads=options.threads,
                context=options.prompt + options.gen + 1,
                batch=options.batch,
            )
            command = [str(python), str(HERE / "serve.py"), peer.adapter, json.dumps(asdict(job), default=str)]
            log = logs / f"{str(contender).replace('/', '-')}.log"
            children.append(stack.enter_context(Child(command, peer.variables, log)))
        command = [str(ferrule), str(HERE / "ceilings.py"), str(options.threads)]
        machine = stack.enter_context(Child(command, {}, logs / "ceilings.log"))
        for child in children:
            child.ask(
                prompts=[list(range(3, 35))] * options.batch, gen=2
            )  # the first access to each memory page is slow
        rounds: list[Round] = []
        while len(steady_rounds(rounds)) < options.repeat and len(rounds) < 2 * options.repeat:
            print(f"round {len(rounds) + 1}", file=sys.stderr)
            choices = random.Random(len(rounds)).choices
            prompts = [choices(range(vocabulary), k=options.prompt) for _ in range(options.batch)]
            rounds.append([measure(child, machine, prompts, options.gen) for child in children])
    steady = steady_rounds(rounds)
    loaded = [(str(contender), Loaded(**child.greeting)) for contender, child in zip(contenders, children, strict=True)]
    medians = rows(workload, loaded, steady)
    sequences = f"{options.batch} sequences, " if options.batch > 1 else ""
    print(f"{options.shape}, {options.threads} threads, {sequences}prompt {options.prompt}, then {options.gen} tokens")
    print(f"median of {len(steady)} rounds; {len(rounds) - len(steady)} in bad windows left out")
    print()
    print(table(medians))
    print()
    for row in medians:
        print(f"{row.contender}: {row.version}")
    if options.out is not None:
        text = record(shlex.join(["compare.py", *sys.argv[1:]]), workload, medians, rounds, steady)
        options.out.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except (ChildError, FileNotFoundError, ValueError) as error:
        sys.exit(f"compare.py: {error}")
