"""The real engine with forks, signals, threads, subinterpreters and exits of its process.

Each case runs in a separate process, because it may end that process. Limits of time are those of processor time, and
have fivefold slack.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ferrule import _native
from processor_time import processor_seconds_of_children, wait_until_computing

SLACK = 5.0


def python(code: str, *arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "faulthandler", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


FORK = """
import os, sys, threading, time
from ferrule import LLM, SamplingParams
llm = LLM(threads=2)
greedy = SamplingParams(temperature=0, max_tokens=8)
expected = llm.generate("The capital of France is", greedy)[0].outputs[0].text
if sys.argv[1] == "busy":
    long = SamplingParams(max_tokens=1500, ignore_eos=True)
    threading.Thread(target=lambda: llm.generate("Once", long), daemon=True).start()
    time.sleep(0.2)
child = os.fork()
if child == 0:
    try:
        code = 0 if llm.generate("The capital of France is", greedy)[0].outputs[0].text == expected else 1
    except RuntimeError:
        code = 3
    os._exit(code)
_, status = os.waitpid(child, 0)
assert llm.generate("The capital of France is", greedy)[0].outputs[0].text == expected, "the parent's engine is hurt"
print(os.waitstatus_to_exitcode(status))
os._exit(0)
"""


def test_forked_child_can_use_engine() -> None:
    done = python(FORK, "idle")
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr


def test_fork_during_step_works_or_raises() -> None:
    done = python(FORK, "busy")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in {"0", "3"}


FORK_WITHIN = """
import os, sys
from ferrule import LLM, EngineError, SamplingParams
llm, other = LLM(threads=2), LLM(threads=1)
def text(llm, **more):
    params = SamplingParams(temperature=0, max_tokens=4, **more)
    return llm.generate("The capital of France is", params)[0].outputs[0].text
expected = text(llm)
parent, codes = os.getpid(), []
def fork(token_ids, logits):
    if os.getpid() != parent or codes:
        return
    child = os.fork()
    if child == 0:
        if sys.argv[1] == "exit":
            os._exit(0)
        return
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
try:
    got = text(llm, logits_processors=[fork])
except EngineError as error:
    assert os.getpid() != parent and "forked" in str(error), error
if os.getpid() != parent:
    # Here the step was torn off. What was not in one works.
    try:
        text(llm)
        os._exit(1)
    except EngineError as error:
        assert "forked" in str(error)
    assert text(other) == expected
    with LLM(threads=2) as new:
        assert text(new) == expected
    child = os.fork()
    if child == 0:
        os._exit(0 if text(other) == expected else 1)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert got == expected == text(llm)
print(codes)
os._exit(0)
"""


@pytest.mark.parametrize("child", ["exit", "return"])
def test_logits_processor_can_fork(child: str) -> None:
    done = python(FORK_WITHIN, child)
    assert (done.returncode, done.stdout.strip()) == (0, "[0]"), done.stderr


FORK_BESIDE = """
import os, threading, time
from ferrule import LLM, SamplingParams
llm, other = LLM(threads=1), LLM(threads=1)
forked = []
def fork():
    child = os.fork()
    if child == 0:
        os._exit(0)
    forked.append(os.waitpid(child, 0)[1])
def use_other(token_ids, logits):
    if not forks.is_alive() and not forked:
        forks.start()
        # It waits for this step by then.
        time.sleep(0.3)
    other.generate("x", SamplingParams(max_tokens=2))
forks = threading.Thread(target=fork)
llm.generate("x", SamplingParams(max_tokens=3, ignore_eos=True, logits_processors=[use_other]))
forks.join()
print(forked)
os._exit(0)
"""


def test_logits_processor_uses_another_engine_during_fork() -> None:
    done = python(FORK_BESIDE)
    assert (done.returncode, done.stdout.strip()) == (0, "[0]"), done.stderr


INTERRUPT = """
import sys, time
from ferrule import LLM, SamplingParams
llm = LLM(sys.argv[1], threads=2)
greedy = SamplingParams(temperature=0, max_tokens=8)
expected = llm.generate("The capital of France is", greedy)[0].outputs[0].text
prompt = {"prompt_token_ids": [300 + i % 1000 for i in range(30_000)]}
print("ready", flush=True)
try:
    if sys.argv[2] == "generate":
        llm.generate(prompt, greedy)
    else:
        llm.logits(prompt["prompt_token_ids"][:8_000])
    print("finished before the interrupt")
except KeyboardInterrupt:
    print(time.process_time(), flush=True)
assert llm.generate("The capital of France is", greedy)[0].outputs[0].text == expected
print("usable")
"""


@pytest.mark.parametrize("call", ["generate", "logits"])
def test_ctrl_c_ends_prefill_and_engine_stays_usable(call: str, long_model: Path) -> None:
    command = [sys.executable, "-c", INTERRUPT, str(long_model), call]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        sent = wait_until_computing(process.pid)
        os.kill(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=120)
    interrupted, usable = output.split()
    assert float(interrupted) - sent < 0.2 * SLACK
    assert usable == "usable", errors


THREADS = """
import threading
from ferrule import LLM, SamplingParams
llm = LLM(threads=2)
params = [SamplingParams(temperature=0.8, seed=i, max_tokens=24, ignore_eos=True) for i in range(8)]
jobs = [("Once upon a time," + " and" * i, params[i]) for i in range(8)]
alone = [llm.generate(*job)[0].outputs[0].token_ids for job in jobs]
together = [None] * 8
def work(i):
    together[i] = llm.generate(*jobs[i])[0].outputs[0].token_ids
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert together == alone
"""


def test_eight_threads_equal_single_thread() -> None:
    done = python(THREADS)
    assert done.returncode == 0, done.stderr


SUBINTERPRETER = """
import sys
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
code = '''
try:
    from ferrule import LLM, SamplingParams
    print(LLM().generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].text)
except ImportError as error:
    print("ImportError", error)
'''
interpreter = interpreters.create()
interpreters.run_string(interpreter, code)
"""


def test_subinterpreter_works_or_cannot_import() -> None:
    done = python(SUBINTERPRETER)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout or "ImportError" in done.stdout


EXIT = """
import sys, threading, time
from ferrule import LLM, SamplingParams
llm = LLM(sys.argv[1])
prompt = {"prompt_token_ids": [300 + i % 1000 for i in range(30_000)]}
threading.Thread(target=lambda: llm.generate(prompt, SamplingParams(max_tokens=8)), daemon=True).start()
while not llm.metrics().computed_tokens:
    time.sleep(0.01)
print(time.process_time(), flush=True)
"""


def test_exit_during_generation_is_clean(long_model: Path) -> None:
    before = processor_seconds_of_children()
    done = python(EXIT, str(long_model))
    assert processor_seconds_of_children() - before - float(done.stdout) < 1.0 * SLACK
    assert done.returncode == 0, done.stderr
    assert not done.stderr


DISK = """
import sys, time
from ferrule import LLM, SamplingParams
prompt = {"prompt_token_ids": [300 + i % 1000 for i in range(3_000)]}
greedy = SamplingParams(temperature=0, max_tokens=4)
llm = LLM(sys.argv[1], prefix_cache_dir=sys.argv[2])
output = llm.generate(prompt, greedy)[0]
print(output.outputs[0].token_ids, output.num_cached_tokens, sep="|", flush=True)
if sys.argv[3] == "close":
    llm.close()
print(time.process_time(), flush=True)
"""


def test_disk_prefix_cache_is_shared_by_processes_and_does_not_delay_exit(long_model: Path, tmp_path: Path) -> None:
    """Two concurrent processes write the same pages; then a third one reads them."""
    command = [sys.executable, "-X", "faulthandler", "-c", DISK, str(long_model), str(tmp_path / "pages")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with (
        subprocess.Popen([*command, "exit"], **pipes) as first,  # type: ignore[call-overload]
        subprocess.Popen([*command, "close"], **pipes) as second,  # type: ignore[call-overload]
    ):
        done = [process.communicate(timeout=120) for process in (first, second)]
        assert [first.returncode, second.returncode] == [0, 0], done
    assert (tmp_path / "pages").stat().st_mode & 0o777 == 0o700
    before = processor_seconds_of_children()
    third = subprocess.run([*command, "exit"], capture_output=True, text=True, timeout=60, check=True)
    used = processor_seconds_of_children() - before
    tokens = {output.splitlines()[0].split("|")[0] for output in (done[0][0], done[1][0], third.stdout)}
    assert len(tokens) == 1
    answer, leaving = third.stdout.splitlines()
    assert int(answer.split("|")[1]) >= 2_900
    assert used - float(leaving) < 1.0 * SLACK


def test_threads_default_to_cpu_affinity() -> None:
    """Tests CPU affinity; rust/kernels/src/machine tests container quotas with simulated cgroup trees."""
    code = "import os; os.sched_setaffinity(0, {0}); from ferrule import LLM; print(LLM().info()['threads'])"
    assert python(code).stdout.strip() == "1"
    assert 1 <= _native.cpu_count() <= len(os.sched_getaffinity(0))
