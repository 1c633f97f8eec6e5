"""Models of the hub, from a server on loopback. Each case runs in a separate process, because the library reads its
environment on import."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import TINY
from ferrule import ModelFileError
from ferrule._loading.hub import fetch
from hub.server import COMMIT, Hub, Repository

TESTS = Path(__file__).parent.parent
SMALL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
FILES = {name: (TINY / name).read_bytes() for name in SMALL}
# Weights without tensors, which the fake does not read.
FILES["model.safetensors"] = (17).to_bytes(8, "little") + b"{}".ljust(17)
OTHERS = {
    "pytorch_model.bin": b"pickle",
    "model.pkl": b"pickle",
    "training.py": b"raise SystemExit('never run')",
    "README.md": b"#",
    "onnx/config.json": b"{}",
    "onnx/1_Pooling/config.json": b"{}",
    "original/model.safetensors": b"twice",
    "consolidated.safetensors": b"twice",
}
EMBEDS = {
    "modules.json": b"""[{"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
        {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]""",
    "1_Pooling/config.json": b'{"pooling_mode": "lasttoken"}',
    "2_Dense/config.json": b'{"in_features": 256, "out_features": 8}',
    "2_Dense/model.safetensors": b"nor this",
    "sentence_bert_config.json": b'{"max_seq_length": 128}',
    "config_sentence_transformers.json": b"{}",
}
GGUFS = {
    "model-Q8_0.gguf": b"a model",
    "model-Q4_0-00001-of-00002.gguf": b"its first part",
    "model-Q4_0-00002-of-00002.gguf": b"its second part",
}
FIND = """
import sys
from ferrule import FerruleError
from ferrule._loading import find_model
try:
    print(find_model(sys.argv[1], sys.argv[2] or None))
except FerruleError as error:
    print(type(error).__name__, error)
"""
LOOK = FIND.replace("sys.argv[2] or None", "weights=False")
LOAD = """
import sys, fakes
fakes.install()
from ferrule import LLM, FerruleError, SamplingParams
try:
    llm = LLM(sys.argv[1], revision=sys.argv[2] or None)
    tokens = llm.generate("x", SamplingParams(temperature=0, max_tokens=2))[0].outputs[0].token_ids
    print(tokens, llm.info()["directory"])
except FerruleError as error:
    print(type(error).__name__, error)
"""


INFO = """
import sys, fakes
fakes.install()
from ferrule import model_info
info = model_info(sys.argv[1])
print(info["model"], info["layers"], info["checkpoint_bytes"])
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    repositories = {
        "org/model": Repository(FILES | OTHERS),
        "org/embeds": Repository(FILES | OTHERS | EMBEDS),
        "org/private": Repository(FILES, token="hf_secret"),
        "org/gated": Repository(FILES, gated=True, token="hf_secret"),
        "org/gguf": Repository({"README.md": b"#", **GGUFS}),
        "org/pickled": Repository({"config.json": FILES["config.json"], "pytorch_model.bin": b"pickle"}),
    }
    with Hub(repositories) as hub:
        yield hub


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def load(
    hub: Hub, home: Path, model: str = "org/model", revision: str = "", *, code: str = LOAD, **environment: str
) -> str:
    """Loads a model and returns its first tokens or the error."""
    hub.requests.clear()
    hub.authorizations.clear()
    base = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    settings = {"HF_HOME": str(home), "HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_XET": "1", "no_proxy": "*"}
    process = subprocess.run(
        [sys.executable, "-c", code, model, revision],
        env=base | settings | environment,
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def test_required_files_are_downloaded_and_never_pickle(hub: Hub, home: Path) -> None:
    loaded = load(hub, home)
    assert str(home / "hub" / "models--org--model" / "snapshots" / COMMIT) in loaded
    assert hub.downloads() == set(FILES)
    assert hub.authorizations == {None}


def test_model_info_downloads_no_weights(hub: Hub, home: Path) -> None:
    assert load(hub, home, code=INFO) == "org/model 6 None"
    assert hub.downloads() == set(SMALL)
    load(hub, home)
    assert hub.downloads() == {"model.safetensors"}
    assert load(hub, home, code=INFO) == "org/model 6 10000000"
    assert hub.downloads() == set()


def test_sentence_embedding_folders_are_downloaded(hub: Hub, home: Path) -> None:
    assert load(hub, home, "org/embeds").startswith("[")
    assert hub.downloads() == set(FILES) | set(EMBEDS)


def test_cached_model_is_used_online_and_offline(hub: Hub, home: Path) -> None:
    loaded = load(hub, home)
    assert load(hub, home) == loaded
    assert hub.downloads() == set()
    assert load(hub, home, HF_HUB_OFFLINE="1") == loaded
    assert hub.requests == []
    assert load(hub, home, HF_ENDPOINT="http://127.0.0.1:9") == loaded


def test_offline_without_cached_model(hub: Hub, home: Path) -> None:
    refused = load(hub, home, HF_HUB_OFFLINE="1")
    assert refused.startswith("ModelNotFoundError org/model: incomplete or missing in the cache")
    assert "HF_HUB_OFFLINE" in refused
    assert hub.requests == []


def test_unreachable_hub_is_reported(hub: Hub, home: Path) -> None:
    refused = load(hub, home, HF_ENDPOINT="http://127.0.0.1:9")
    assert refused.startswith("ModelNotFoundError org/model: ")
    assert "Connection refused" in refused
    assert "http://127.0.0.1:9/org/model" in refused


def test_unknown_repository_is_reported(hub: Hub, home: Path) -> None:
    refused = load(hub, home, "org/nothing")
    assert refused.startswith("ModelNotFoundError org/nothing: model not found; if it is private, set HF_TOKEN")
    assert f"{hub.endpoint}/org/nothing" in refused
    assert str(TESTS / "org" / "nothing") in refused


def test_private_repository_requires_token(hub: Hub, home: Path) -> None:
    assert load(hub, home, "org/private").startswith(
        "ModelNotFoundError org/private: model not found; if it is private, set HF_TOKEN"
    )
    assert load(hub, home, "org/private", HF_TOKEN="hf_secret").startswith("[")
    assert "Bearer hf_secret" in hub.authorizations


def test_gated_repository_error_names_token(hub: Hub, home: Path) -> None:
    refused = load(hub, home, "org/gated")
    assert refused.startswith("ModelNotFoundError org/gated: access to this model is restricted")
    assert "HF_TOKEN" in refused
    assert load(hub, home, "org/gated", HF_TOKEN="hf_secret").startswith("[")


def test_revision_selects_commit(hub: Hub, home: Path) -> None:
    assert COMMIT in load(hub, home, revision=COMMIT)
    refused = load(hub, home, revision="v9")
    assert refused.startswith("ModelNotFoundError org/model@v9: the repository does not have this revision")


def test_pickled_weights_are_not_downloaded(hub: Hub, home: Path) -> None:
    load(hub, home, "org/pickled")
    assert hub.downloads() == {"config.json"}


def test_invalid_repository_names_send_no_request(hub: Hub, home: Path) -> None:
    for name in ("no-such-directory", "./org/model", "org/model/more", "/org/model", "../model", "org/.."):
        assert load(hub, home, name).startswith("ModelNotFoundError"), name
    assert hub.requests == []


def test_download_failure_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_off(*_: object, **__: object) -> str:
        raise RuntimeError("Data processing error")  # as raised by hf_xet; HTTP clients have separate classes

    monkeypatch.setattr("huggingface_hub.snapshot_download", break_off)
    with pytest.raises(ModelFileError, match="org/model: RuntimeError: Data processing error"):
        fetch("org/model", None)


def test_quantization_suffix_downloads_one_file(hub: Hub, home: Path) -> None:
    found = load(hub, home, "org/gguf:q8_0", code=FIND)
    assert found == str(home / "hub" / "models--org--gguf" / "snapshots" / COMMIT / "model-Q8_0.gguf")
    assert hub.downloads() == {"model-Q8_0.gguf"}


def test_quantization_suffix_downloads_all_split_files(hub: Hub, home: Path) -> None:
    assert load(hub, home, "org/gguf:Q4_0", code=FIND).endswith("model-Q4_0-00001-of-00002.gguf")
    assert hub.downloads() == {"model-Q4_0-00001-of-00002.gguf", "model-Q4_0-00002-of-00002.gguf"}
    assert load(hub, home, "org/gguf:Q4_0", code=FIND, HF_HUB_OFFLINE="1").endswith("model-Q4_0-00001-of-00002.gguf")
    assert hub.requests == []


def test_missing_or_omitted_quantization_lists_choices(hub: Hub, home: Path) -> None:
    missing = load(hub, home, "org/gguf:Q6_K", code=FIND)
    assert missing.startswith(
        "ModelNotFoundError org/gguf:Q6_K: no such file; available: model-Q4_0.gguf, model-Q8_0.gguf"
    )
    left_out = load(hub, home, "org/gguf", code=FIND)
    assert "org/gguf:Q4_K_M" in left_out
    assert "model-Q8_0.gguf" in left_out
    assert load(hub, home, "org/nothing:Q4_0", code=FIND).startswith("ModelNotFoundError org/nothing: model not found")
    assert not hub.downloads() & set(GGUFS)


def test_gguf_info_requires_cached_file(hub: Hub, home: Path) -> None:
    """Showing a file that is not in the cache is refused, and downloads nothing."""
    looked = load(hub, home, "org/gguf:Q8_0", code=LOOK)
    assert looked.startswith("ModelNotFoundError")
    assert not hub.downloads() & set(GGUFS)
    load(hub, home, "org/gguf:Q8_0", code=FIND)
    assert load(hub, home, "org/gguf:Q8_0", code=LOOK).endswith("model-Q8_0.gguf")
