"""Files of the page: none refers to other origins, third-party files are listed, and every file is used."""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import ferrule

PAGE = Path(ferrule.__file__).parent / "server" / "page"
VENDOR = PAGE / "vendor"
RECORDS = tomllib.loads((VENDOR / "VENDORED.toml").read_text())
FOLDERS = {
    f"{folder['name']}/{file}": {**folder, "sha256": sha256}
    for folder in RECORDS["folder"]
    for file, sha256 in folder["sha256"].items()
}
LISTED = {entry["name"]: entry for entry in RECORDS["file"]} | FOLDERS
OURS = [path for path in PAGE.rglob("*") if path.is_file() and VENDOR not in path.parents]
SCRIPTS = [path for path in OURS if path.suffix == ".js"]
STYLES = [path for path in OURS if path.suffix == ".css"]

IMPORTED = re.compile(r'^(?:import|export) (?:[^"]*? from )?"([^"]+)";|\bimport\("([^"]+)"\)', re.MULTILINE)


def name(path: Path) -> str:
    return str(path.relative_to(PAGE))


def test_third_party_files_are_listed_with_licence_and_hash() -> None:
    found = {str(path.relative_to(VENDOR)) for path in VENDOR.rglob("*") if path.is_file()}
    assert found == {*LISTED, "VENDORED.toml"}
    for file, entry in LISTED.items():
        assert entry["licence"]
        if not file.startswith("LICENSE."):
            assert entry["sha256"] == hashlib.sha256((VENDOR / file).read_bytes()).hexdigest()
            assert entry.keys() >= {"what", "version", "source", "package"}
            assert f"LICENSE.{re.split('[./]', file)[0]}" in LISTED


def test_the_distribution_states_the_licences_of_third_party_files() -> None:
    root = Path(__file__).parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    shipped = {path.name for pattern in project["license-files"] for path in root.glob(pattern)}
    assert shipped == {"LICENSE"} | {file for file in LISTED if file.startswith("LICENSE.")}
    used = {entry["licence"] for file, entry in LISTED.items() if not file.startswith("LICENSE.")}
    stated = set(project["license"].split(" AND "))
    assert stated == {"Apache-2.0"} | {licence for text in used for licence in text.split(" and ")}


def test_every_file_is_used() -> None:
    html = (PAGE / "index.html").read_text()
    linked = set(re.findall(r'(?:href|src)="([^"#]+)"', html))
    reached = {"index.html"} | linked
    queue = [path for path in linked if path.endswith(".js")]
    while queue:
        script = queue.pop()
        for imported in map("".join, IMPORTED.findall((PAGE / script).read_text())):
            assert imported.startswith("."), f"{script} imports {imported}"
            target = name(((PAGE / script).parent / imported).resolve())
            if target not in reached:
                reached.add(target)
                queue.append(target)
    existing = {name(path) for path in OURS} | {f"vendor/{file}" for file in LISTED if file.endswith(".js")}
    assert reached == existing


@pytest.mark.parametrize("path", [PAGE / "index.html", *SCRIPTS, *STYLES], ids=name)
def test_no_file_refers_to_another_origin(path: Path) -> None:
    for url in re.findall(r"""(?:https?:)?//[a-z0-9.-]+\.[a-z]+[^\s"')]*""", path.read_text()):
        # Names of XML namespaces, and specifications in comments.
        assert urlsplit(url).hostname in {"www.w3.org", "html.spec.whatwg.org"}, url
    assert "@import" not in path.read_text()


def test_the_page_has_no_inline_script_or_style() -> None:
    html = (PAGE / "index.html").read_text()
    assert re.findall(r"<script[^>]*>[^<]+</script>|<style|\sstyle=|\son[a-z]+=|javascript:", html) == []


@pytest.mark.parametrize("path", SCRIPTS, ids=name)
def test_no_script_parses_text_as_html(path: Path) -> None:
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc"
    assert re.findall(sinks, path.read_text()) == []


@pytest.mark.parametrize("path", [*SCRIPTS, *STYLES], ids=name)
def test_files_are_small_and_begin_with_their_purpose(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 300
    assert lines[0].startswith(("//", "/*"))


@pytest.mark.parametrize("path", STYLES, ids=name)
def test_colors_have_names(path: Path) -> None:
    """Only one file defines colors, for the light and the dark theme."""
    found = re.findall(r"#[0-9a-f]{3,8}\b(?=[^{]*;)|\brgba?\(|\bhsl", path.read_text())
    assert (found != []) == (path.name == "colors.css")
