"""The files of the chat page over HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi import FastAPI

import fakes
from ferrule.server import create_app
from ferrule.server.models import Models
from ferrule.server.page_files import Page
from server.live import Live


def test_files_have_their_types(live: Live) -> None:
    for path, kind in (
        ("/", "text/html; charset=utf-8"),
        ("/index.html", "text/html; charset=utf-8"),
        ("/js/dom.js", "text/javascript; charset=utf-8"),
        ("/css/prose.css", "text/css; charset=utf-8"),
        ("/img/ferrule.svg", "image/svg+xml"),
    ):
        found = live.request(path)
        assert (found.status, found.headers["Content-Type"]) == (200, kind)
        assert found.headers["Cache-Control"] == "no-cache"
        head = live.request(path, method="HEAD")
        assert (head.status, head.body) == (200, b"")
        assert head.headers["Content-Length"] == str(len(found.body))


@pytest.mark.parametrize("path", ["/js", "/js/", "//index.html", "/js/../index.html", "/index.html/", "/a%00b"])
def test_other_paths_are_not_found(live: Live, path: str) -> None:
    assert live.request(path).status == 404


def test_an_unchanged_file_is_not_sent_again(live: Live) -> None:
    found = live.request("/js/dom.js")
    again = live.request("/js/dom.js", headers={"If-None-Match": found.headers["ETag"]})
    assert (again.status, again.body, again.headers["ETag"]) == (304, b"", found.headers["ETag"])
    assert "default-src 'none'" in again.headers["Content-Security-Policy"]
    assert live.request("/js/dom.js", headers={"If-None-Match": '"other"'}).body == found.body


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    from starlette.testclient import TestClient

    file = tmp_path / "index.html"
    file.write_text("first")
    client = TestClient(FastAPI())
    client.app.router.default = Page(tmp_path)  # type: ignore[union-attr]
    before = client.get("/")
    file.write_text("second")
    after = client.get("/", headers={"If-None-Match": before.headers["ETag"]})
    assert (before.text, after.text) == ("first", "second")
    file.unlink()
    assert client.get("/").status_code == 404


def test_the_page_of_a_mounted_application(engine: type[fakes.Engine]) -> None:
    from starlette.testclient import TestClient

    outer = FastAPI()
    outer.mount("/llm", create_app(Models({})))
    client = TestClient(outer, base_url="http://localhost")
    assert client.get("/llm/").headers["Content-Type"].startswith("text/html")
    assert client.get("/llm/js/dom.js").status_code == 200
    assert client.get("/js/dom.js").status_code == 404
