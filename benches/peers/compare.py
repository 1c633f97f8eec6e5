#!/usr/bin/env python3
"""Compare ferrule with its peers on the same random weights: speed, bytes, shares of the machine's limits.

    python benches/peers/compare.py --shape llama-1b ferrule:int4 llama.cpp-avx512:Q4_0
    python benches/peers/compare.py --gguf model.gguf ferrule:auto llama.cpp-avx512:auto

Every contender stays loaded in a separate process. A round measures each of them once, and the ceilings before each.
Each round has another prompt, so that prefix caches have no effect.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from adapters.interface import Job, Loaded, Timing
from child import Child, ChildError
from registry import PEERS, Contender
from report import Ceilings, Measurement, Round, Workload, median_ceilings, record, rows, steady_rounds, table

HERE = Path(__file__).resolve().parent
WORK = HERE / ".work"
"""Directory of environments, checkpoints and their conversions, which git ignores."""


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contenders", nargs="+", help=f"PEER:FORMAT[/KV] with PEER one of {', '.join(PEERS)}")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--shape", default="llama-1b", help="of random weights: a name that `ferrule bench` knows")
    model.add_argument("--gguf", type=Path, help="a file, which is measured in its own formats: PEER:auto")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--gen", type=int, default=64, help="tokens after the first")
    parser.add_argument("--batch", type=int, default=1, help="sequences at once")
    parser.add_argument("--repeat", type=int, default=7, help="rounds; medians are shown")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ferrule-python", type=Path, help="the Python that has ferrule; by default as installed")
    parser.add_argument("--out", type=Path, help="write the record there, as JSON")
    return parser.parse_args()


@dataclass(frozen=True)
class Description:
    """Sizes of a model that do not depend on formats."""

    vocabulary: int
    layer_parameters: int
    """Number of weights of the layers' projections that a token uses, so only its own experts."""


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


def described(model: Path, python: Path) -> Description:
    """Return what `ferrule info` says about a model; raises CalledProcessError if ferrule cannot read it."""
    command = [python, "-m", "ferrule", "info", model, "--json"]
    info = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)  # noqa: S603 -- ferrule
    return Description(vocabulary=info["vocab_size"], layer_parameters=info["layer_parameters_per_token"])


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
    model: Path = options.gguf.resolve() if options.gguf else checkpoint(options.shape, ferrule)
    name: str = options.gguf.name if options.gguf else options.shape
    description = described(model, ferrule)
    workload = Workload(name, description.layer_parameters, options.prompt, options.gen, options.threads, options.batch)
    logs = WORK / "logs"
    logs.mkdir(exist_ok=True)
    with ExitStack() as stack:
        children: list[Child] = []
        for contender, python in zip(contenders, pythons, strict=True):
            print(f"loading {contender}", file=sys.stderr)
            peer = PEERS[contender.peer]
            job = Job(
                model=model,
                work=WORK / name,
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
            prompts = [choices(range(description.vocabulary), k=options.prompt) for _ in range(options.batch)]
            rounds.append([measure(child, machine, prompts, options.gen) for child in children])
    steady = steady_rounds(rounds)
    loaded = [(str(contender), Loaded(**child.greeting)) for contender, child in zip(contenders, children, strict=True)]
    medians = rows(workload, loaded, steady)
    sequences = f"{options.batch} sequences, " if options.batch > 1 else ""
    print(f"{name}, {options.threads} threads, {sequences}prompt {options.prompt}, then {options.gen} tokens")
    ceilings = median_ceilings(steady)
    print(
        f"median of {len(steady)} rounds; {len(rounds) - len(steady)} in bad windows left out; "
        f"read bandwidth {ceilings.read / 1e9:.1f} GB/s, int8 peak {ceilings.int8 / 1e9:.0f} GOPS"
    )
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
    except (ChildError, FileNotFoundError, ValueError, subprocess.CalledProcessError) as error:
        sys.exit(f"compare.py: {error}")
