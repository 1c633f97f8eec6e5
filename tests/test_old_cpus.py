"""Emulated processors: an old one without AVX2, and one with AVX2 but without AVX-512.

qemu's user mode runs the unmodified package on them. An instruction that the processor lacks ends the process with
SIGILL, so a successful run used no such instruction. The logits must be bitwise equal to the logits that this machine
computes when FERRULE_ISA forces the same instruction set.
"""

import json
import os
import shutil
import subprocess
import sys
from functools import cache

import pytest

from ferrule import _native

# Names of the processors in Debian's qemu, and the instruction sets that ferrule must detect on them.
OLD_CPUS = {"Nehalem": ["scalar"], "Haswell": ["scalar", "avx2"]}

# Variables that select an instruction set, of ferrule and of NumPy's BLAS, which would be used on any processor.
SELECT_INSTRUCTIONS = ("FERRULE_ISA", "OPENBLAS_CORETYPE")

PROGRAM = """
import hashlib, json
from ferrule import LLM, SamplingParams, _native

llm = LLM(threads=1, quantization="f32", max_model_len=64)
params = SamplingParams(temperature=0, max_tokens=4)
print(json.dumps({
    "isa": _native.isa(),
    "available": _native.available_isas(),
    "text": llm.generate("The capital of France is", params)[0].outputs[0].text,
    "logits": hashlib.sha256(llm.logits([1, 300, 20]).tobytes()).hexdigest(),
}))
"""


def python(program: str, *, cpu: str | None = None, isa: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a program with this interpreter, on an emulated processor if one is named."""
    command = [sys.executable, "-c", program]
    if cpu is not None:
        qemu = shutil.which("qemu-x86_64")
        assert qemu is not None, "qemu-x86_64 is missing; install it with: sudo apt-get install qemu-user"
        command = [qemu, "-cpu", cpu, *command]
    environment = {name: value for name, value in os.environ.items() if name not in SELECT_INSTRUCTIONS}
    if isa is not None:
        environment["FERRULE_ISA"] = isa
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)


def report(*, cpu: str | None = None, isa: str | None = None) -> dict[str, object]:
    """Returns the output of PROGRAM."""
    done = python(PROGRAM, cpu=cpu, isa=isa)
    assert done.returncode == 0, f"exit {done.returncode} on {cpu or 'this machine'}: {done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])


@cache
def here(isa: str) -> dict[str, object]:
    """Returns the output of PROGRAM on this machine with an instruction set."""
    return report(isa=isa)


@pytest.mark.parametrize("cpu", OLD_CPUS)
def test_emulated_cpu_output_equals_same_isa_on_this_cpu(cpu: str) -> None:
    there = report(cpu=cpu)
    assert there["available"] == OLD_CPUS[cpu]
    assert there["isa"] == OLD_CPUS[cpu][-1]
    assert "Paris" in str(there["text"])
    if there["isa"] in _native.available_isas():
        expected = here(str(there["isa"]))
        assert (there["text"], there["logits"]) == (expected["text"], expected["logits"])


@pytest.mark.parametrize("isa", _native.available_isas())
def test_every_available_isa_can_be_forced(isa: str) -> None:
    assert here(isa)["isa"] == isa
    assert "Paris" in str(here(isa)["text"])


def test_forcing_unavailable_isa_is_an_error() -> None:
    """All unavailable instruction sets take the same path, so one emulated process is enough."""
    done = python("import ferrule; ferrule.LLM(threads=1)", cpu="Nehalem", isa="avx2")
    assert done.returncode == 1, f"exit {done.returncode}: {done.stderr}"
    last = done.stderr.strip().splitlines()[-1]
    message = "FERRULE_ISA must be an instruction set of this machine (scalar), got 'avx2'"
    assert last == f"ferrule.errors.InvalidParameterError: {message}"


def test_forcing_unknown_isa_is_an_error() -> None:
    done = python("import ferrule; ferrule.LLM(threads=1)", isa="sse9")
    assert done.returncode == 1, f"exit {done.returncode}: {done.stderr}"
    last = done.stderr.strip().splitlines()[-1]
    message = f"FERRULE_ISA must be one of {', '.join(_native.isa_names())}, got 'sse9'"
    assert last == f"ferrule.errors.InvalidParameterError: {message}"
