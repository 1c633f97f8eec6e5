"""A small server that imitates the hub's routes used by huggingface_hub: revisions, trees, files with headers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repository:
    """Files of a repository by path, and the token required to read them."""

    files: dict[str, bytes]
    gated: bool = False
    token: str | None = None
    """Token without which the hub reports that the repository does not exist."""
    revisions: tuple[str, ...] = ("main", COMMIT)
    slow: frozenset[str] = frozenset()
    """Files that are sent slowly: half a megabyte every 0.1 s."""


@dataclass
class Hub:
    """Serves repositories on loopback, and records the requests."""

    repositories: dict[str, Repository]
    requests: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Method and path of each request."""
    authorizations: set[str | None] = field(default_factory=set[str | None])

    def __enter__(self) -> Self:
        hub = self

        class Handler(_Handler):
            repositories = hub.repositories
            requests = hub.requests
            authorizations = hub.authorizations

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        """URL for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def downloads(self) -> set[str]:
        """Files whose content was requested."""
        return {
            path.split("/resolve/")[1].split("/", 1)[1]
            for method, path in self.requests
            if method == "GET" and "/resolve/" in path
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    repositories: dict[str, Repository]
    requests: list[tuple[str, str]]
    authorizations: set[str | None]

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # name of the parameter in the base class
        """Keeps the test's output clean."""

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self.requests.append((self.command, path))
        self.authorizations.add(self.headers.get("authorization"))
        api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models/").strip("/").split("/")
        name, rest = "/".join(parts[:2]), parts[2:]
        repository = self.repositories.get(name)
        if repository is None or not self._may_read(repository):
            return self._error(401 if repository is None else 404, "RepoNotFound", "Repository not found")
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in repository.revisions:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if api:
            return self._api(name, repository, rest[0] if rest else "revision")
        if repository.gated and self.headers.get("authorization") != f"Bearer {repository.token}":
            return self._error(401, "GatedRepo", "Access to this model is restricted")
        return self._file(repository, "/".join(rest[2:]))

    def _may_read(self, repository: Repository) -> bool:
        return (
            repository.gated
            or repository.token is None
            or self.headers.get("authorization") == f"Bearer {repository.token}"
        )

    def _api(self, name: str, repository: Repository, kind: str) -> None:
        if kind == "tree":
            entries = [
                {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for path, content in repository.files.items()
            ]
            return self._send(200, json.dumps(entries).encode(), {"Content-Type": "application/json"})
        info = {
            "id": name,
            "modelId": name,
            "sha": COMMIT,
            "private": False,
            "gated": "manual" if repository.gated else False,
            "tags": [],
            "downloads": 0,
            "siblings": [{"rfilename": path} for path in repository.files],
        }
        return self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def _file(self, repository: Repository, path: str) -> None:
        content = repository.files.get(path)
        if content is None:
            return self._error(404, "EntryNotFound", "Entry not found")
        etag = hashlib.sha1(content).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start = self.headers.get("range")
        if start is not None:
            content = content[int(start.removeprefix("bytes=").partition("-")[0]) :]
        return self._send(200 if start is None else 206, content, headers, slow=path in repository.slow)

    def _error(self, status: int, code: str, message: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": message})

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, slow: bool = False) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        piece = 500_000 if slow else len(body) or 1
        with contextlib.suppress(ConnectionError):  # the client closed the connection
            for start in range(0, len(body), piece):
                self.wfile.write(body[start : start + piece])
                time.sleep(0.1 if slow else 0)
