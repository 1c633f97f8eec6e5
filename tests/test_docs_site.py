"""The documentation site builds without warnings, loads nothing from other hosts, and includes all pages."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ferrule
from page_blocks import ROOT

DOCS = ROOT / "docs"
RESOURCES = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*?\bsrc=["']?(?:https?:)?//"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|preload|preconnect|icon|modulepreload))[^>]*?\bhref=["']?(?:https?:)?//"""
)
"""Resources of a page that a browser would load from another host."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the site in a temporary directory, so that `make docs` can run at the same time."""
    directory = tmp_path_factory.mktemp("docs")
    shutil.copytree(DOCS, directory / "docs")
    for name in ("python", "examples"):
        (directory / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "zensical.toml", directory)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / "target" / "site"


def test_site_loads_no_external_resources(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        assert RESOURCES.search(page.read_text()) is None, page
    for sheet in site.rglob("*.css"):
        assert re.search(r"@import|url\(['\"]?(?:https?:)?//", sheet.read_text()) is None, sheet


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://unpkg.com/x.js"></script>',
        '<link rel="stylesheet" href="//fonts.googleapis.com/css">',
        '<img alt="" src=http://example.org/x.png>',
    ],
)
def test_external_resources_are_detected(html: str) -> None:
    assert RESOURCES.search(html)


def pages_of(nav: list[dict[str, Any]]) -> Iterator[str]:
    for entry in nav:
        for target in entry.values():
            if isinstance(target, str):
                yield target
            else:
                yield from pages_of(target)


def test_navigation_lists_every_page_once() -> None:
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    assert sorted(pages_of(nav)) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_reference_has_every_public_name(site: Path) -> None:
    reference = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    homes = {name: getattr(ferrule, name) for name in ferrule.__all__ if name != "__version__"}
    missing = [
        name
        for name, value in homes.items()
        if f'id="ferrule.{name}"' not in reference and f'id="{value.__module__}.{name}"' not in reference
    ]
    assert not missing


def test_reference_documents_sampling_params_fields(site: Path) -> None:
    page = (site / "reference" / "parameters.html").read_text()
    for name in ferrule.SamplingParams.__dataclass_fields__:
        assert f'id="ferrule.SamplingParams.{name}"' in page
