"""Addresses of the server: TLS, Unix sockets, and a prefix of paths."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

import fakes
from ferrule._cli.serve import command
from ferrule.errors import InvalidParameterError
from ferrule.server import ServerSettings
from ferrule.server.serving import listen_at_path
from ferrule.server.tls import tls_context
from serve_process import START_SECONDS
from server.live import serving

PROGRAM = """
import sys, fakes
fakes.install()
from ferrule._cli import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a self-signed certificate for localhost and its key."""
    folder = tmp_path_factory.mktemp("tls")
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    made = ("-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem"))
    subprocess.run(["openssl", "req", "-x509", *kind, *names, *made], check=True, capture_output=True)
    return folder


@contextmanager
def started(tmp_path: Path, *options: str) -> Generator[str]:
    """Runs `ferrule serve` on a fake engine; gives the URL that it reports."""
    log = tmp_path / "log"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((*sys.path, os.environ.get("PYTHONPATH", "")))}
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "serve", "--port", "0", *options], stderr=stderr, env=environment
        )
    try:
        found = None
        deadline = time.monotonic() + START_SECONDS
        while found is None and process.poll() is None and time.monotonic() < deadline:
            found = re.search(r'"url": "([^"]*)"', log.read_text())
            time.sleep(0.05)
        assert found is not None, log.read_text()
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()


def status(connection: http.client.HTTPConnection, path: str = "/health") -> int:
    """Returns the status of a request, once the models are loaded."""
    deadline = time.monotonic() + 180
    while True:
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        if answer.status != 503 or time.monotonic() > deadline:
            return answer.status
        time.sleep(0.05)


def test_https_with_a_certificate(certificate: Path, tmp_path: Path) -> None:
    files = ("--ssl-certfile", str(certificate / "cert.pem"), "--ssl-keyfile", str(certificate / "key.pem"))
    with started(tmp_path, *files) as url:
        assert url.startswith("https://127.0.0.1:")
        port = int(url.rpartition(":")[2])
        trusting = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
        client = http.client.HTTPSConnection("127.0.0.1", port, context=trusting, timeout=60)
        assert status(client) == 200
        client.close()
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            status(http.client.HTTPConnection("127.0.0.1", port, timeout=60))


def test_clients_need_a_certificate_with_ca_certs(certificate: Path, tmp_path: Path) -> None:
    cert, key = str(certificate / "cert.pem"), str(certificate / "key.pem")
    with started(tmp_path, "--ssl-certfile", cert, "--ssl-keyfile", key, "--ssl-ca-certs", cert) as url:
        port = int(url.rpartition(":")[2])
        context = ssl.create_default_context(cafile=cert)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            status(http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=60))
        context.load_cert_chain(cert, key)
        client = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=60)
        assert status(client) == 200
        client.close()


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))


def test_unix_socket_is_created_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with started(tmp_path, "--uds", str(path)) as url:
        assert url.startswith("http+unix://")
        client = UnixConnection(path)
        assert status(client) == 200
        client.close()
    assert not path.exists()


def test_only_an_abandoned_socket_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    listen_at_path(str(path)).close()
    with listen_at_path(str(path)), pytest.raises(OSError, match="in use"):
        listen_at_path(str(path))
    path.unlink()
    path.write_text("a file")
    with pytest.raises(OSError, match="in use"):
        listen_at_path(str(path))
    assert path.read_text() == "a file"


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the load of a model fail the test."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("ferrule._api.async_llm.AsyncLLM.__init__", load)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ssl-keyfile", "{key}"], "ssl_keyfile is not supported without ssl_certfile"),
        (["--ssl-certfile", "missing.pem"], "ssl_certfile must be a file, got 'missing.pem'"),
        (["--ssl-certfile", "{cert}", "--ssl-keyfile", "missing.pem"], "ssl_keyfile must be a file"),
        (["--ssl-certfile", "{cert}"], "unencrypted private key"),
        (["--ssl-certfile", "{text}"], "ssl_certfile must be a certificate in PEM"),
        (
            ["--ssl-certfile", "{cert}", "--ssl-keyfile", "{key}", "--ssl-ca-certs", "{text}"],
            "ssl_ca_certs must be certificates in PEM",
        ),
        (["--uds", "missing/socket"], "missing/socket: No such file or directory"),
        (["--uds", "a" * 200], "too long"),
        (["--root-path", "llm"], "root_path must be a path such as /llm"),
        (["--root-path", "/llm/"], "root_path must be a path such as /llm"),
        (["--chat-template", "missing.jinja"], "--chat-template: cannot read missing.jinja"),
    ],
)
def test_unusable_files_and_paths_are_usage_errors(
    certificate: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    names = {"cert": certificate / "cert.pem", "key": certificate / "key.pem", "text": text}
    result = CliRunner().invoke(command, [each.format(**names) for each in options])
    shown = result.output if isinstance(result.exception, SystemExit) else str(result.exception)
    assert isinstance(result.exception, (SystemExit, InvalidParameterError))
    assert message in shown.replace("\n", " ")


def test_context_without_certificate_is_none() -> None:
    assert tls_context(None, None, None) is None


def test_paths_may_have_the_root_path(engine: type[fakes.Engine]) -> None:
    with serving(ServerSettings(root_path="/llm", api_keys=["key"])) as live:
        for prefix in ("", "/llm"):
            assert live.request(f"{prefix}/health").status == 200
            assert live.request(f"{prefix}/v1/models").status == 401
            headers = {"Authorization": "Bearer key"}
            assert live.request(f"{prefix}/v1/models", headers=headers).status == 200
            assert live.request(f"{prefix}/", headers=headers).status == 200
        schema = live.request("/openapi.json", headers=headers).json
        assert schema["servers"] == [{"url": "/llm"}]
