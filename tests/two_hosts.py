"""Two hosts: network namespaces with a link between them, each with its own Ray node of one CPU."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

import ray_head

TESTS = Path(__file__).parent
SECONDS = 600
"""Timeout of a program on the hosts."""
SETTINGS = {
    **ray_head.SETTINGS,
    # A host that is lost is found out within a minute, although a busy machine is slow to answer.
    "RAY_health_check_failure_threshold": "2",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "20000",
}
"""Environment of the nodes and of the programs on the hosts."""
PORT = 6379


@dataclass(frozen=True)
class Host:
    """A network namespace."""

    name: str
    address: str

    def start(self, function: Callable[..., None], *arguments: str) -> subprocess.Popen[str]:
        """Calls a function of a module of the tests in a process on this host, whose three streams are pipes."""
        program = f"import sys, {function.__module__} as module; module.{function.__name__}(*sys.argv[1:])"
        return subprocess.Popen(
            self._inside(sys.executable, "-c", program, *arguments),
            env={**os.environ, **SETTINGS, "PYTHONPATH": f"{TESTS}:{TESTS / 'ray'}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def start_node(self, *options: str) -> None:
        """Starts a Ray node, which `end_processes` ends."""
        ray = str(Path(sys.executable).with_name("ray"))
        limits = ["--num-cpus=1", f"--object-store-memory={ray_head.OBJECT_STORE_BYTES}"]
        command = self._inside(ray, "start", f"--node-ip-address={self.address}", *limits, *options)
        error = ""
        for _ in range(ray_head.ATTEMPTS):
            done = subprocess.run(
                command, env={**os.environ, **SETTINGS}, capture_output=True, text=True, timeout=SECONDS, check=False
            )
            if done.returncode == 0:
                return
            error = done.stderr
            self.end_processes()
        pytest.fail(f"Ray did not start: {error}")

    def connect(self) -> None:
        """Enables the link to the other host."""
        _run("ip", "-n", self.name, "link", "set", "eth0", "up")

    def lose(self) -> None:
        """Ends the host as a power failure does: the other one gets no message about it."""
        _run("ip", "-n", self.name, "link", "set", "eth0", "down")
        self.end_processes()

    def end_processes(self) -> None:
        """Kills all processes of the host."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False)
        for pid in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> None:
        """Kills all processes of the host and removes it, with its end of the link."""
        self.end_processes()
        _run("ip", "netns", "delete", self.name)

    def _inside(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *command]


@dataclass(frozen=True)
class TwoHosts:
    """A Ray cluster whose head is the first host; the second one joins and leaves it."""

    first: Host
    second: Host

    @property
    def head(self) -> str:
        """Address of the cluster."""
        return f"{self.first.address}:{PORT}"

    @contextmanager
    def both(self) -> Generator[None]:
        """Keeps the second host in the cluster while the context is active, unless it is lost."""
        self.join()
        try:
            yield
        finally:
            self.second.end_processes()

    def join(self) -> None:
        """Adds the second host to the cluster."""
        self.second.connect()
        self.second.start_node(f"--address={self.head}")


@contextmanager
def two_hosts() -> Generator[TwoHosts]:
    """Creates the hosts and starts the head; skips the test where that is not permitted."""
    if shutil.which("ip") is None:
        pytest.skip("the command `ip` is not installed")
    with ExitStack() as ends:
        hosts: list[Host] = []
        for letter, address in (("a", "10.231.77.1"), ("b", "10.231.77.2")):
            host = Host(f"ferrule-{os.getpid()}-{letter}", address)
            made = subprocess.run(["ip", "netns", "add", host.name], capture_output=True, text=True, check=False)
            if made.returncode != 0:
                pytest.skip(f"network namespaces are not permitted: {made.stderr.strip()}")
            ends.callback(host.remove)
            hosts.append(host)
        ends_of_link = (f"name eth0 netns {host.name}".split() for host in hosts)
        _run("ip", "link", "add", *next(ends_of_link), "type", "veth", "peer", *next(ends_of_link))
        for host in hosts:
            _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            _run("ip", "-n", host.name, "link", "set", "lo", "up")
            host.connect()
        cluster = TwoHosts(*hosts)
        # The folders of tests are too long for the names of Ray's sockets.
        folder = ends.enter_context(tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True))
        ends.callback(cluster.first.end_processes)  # before the folder is removed
        cluster.first.start_node("--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={folder}")
        yield cluster


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
