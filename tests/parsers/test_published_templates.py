"""Published chat templates: messages that they render are read back by the parsers that they imply.

The templates are those in the source distribution of llama-cpp-python, which pip downloads. FERRULE_SLOW enables
this test; it needs PyPI.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from ferrule._text.parsers import reasoning_parser_for, tool_call_parser_for
from parsers.round_trip import RoundTrip, round_trip

pytestmark = pytest.mark.skipif(
    "FERRULE_SLOW" not in os.environ, reason="downloads 77 MB from PyPI; set FERRULE_SLOW to run it"
)

VERSION = "0.3.36"
FOLDER = "/vendor/llama.cpp/models/templates/"
DOWNLOAD_SECONDS = 600
ENOUGH = 60
KNOWN_PROBLEMS = {
    "fireworks-ai-llama-3-firefunction-v2": "it needs variables of its own",
    "Kimi-K2-Instruct": "it modifies a list, which the sandbox forbids",
    "Kimi-K2-Thinking": "it modifies a list, which the sandbox forbids",
    "LFM2-8B-A1B": "it does not render calls",
    "LFM2.5-Instruct": "it does not render calls",
    "NVIDIA-Nemotron-Nano-v2": "its prompt opens reasoning that its answers never close",
    "ibm-granite-granite-3.3-2B-Instruct": "it does not render calls",
    "meetkai-functionary-medium-v3.2": "its calls have no marker",
}
"""Templates that may fail, and why."""

PARSERS = [
    ("apertus", "Apertus-8B-Instruct", "apertus", "apertus"),
    ("bailing_hybrid", "inclusionai-ling-3.0-flash", "glm45", "deepseek_r1"),
    ("deepseek_v4", "deepseek-ai-DeepSeek-V4", "deepseek_v4", "deepseek_r1"),
    ("gemma4_text", "google-gemma-4-31B-it", "gemma4", "gemma4"),
    ("glm_moe_dsa", "GLM-4.7-Flash", "glm45", "deepseek_r1"),  # GLM-5 has the same marks
    ("granitemoehybrid", "ibm-granite-granite-4.0", "hermes", None),
    ("hy_v3", "tencent-Hy3", "hunyuan_v3", "hunyuan_v3"),
    ("kimi_linear", "moonshotai-Kimi-K2", "kimi_k2", None),  # Kimi Linear has the same marks
    ("lfm2", "LFM2.5-Instruct", "lfm2", "deepseek_r1"),
    ("lfm2_moe", "LFM2-8B-A1B", "lfm2", None),
    ("minimax", "MiniMax-M1", "minimax", None),
    ("minimax_m3_vl_text", "MiniMax-M3", "minimax_m3", "minimax_m3"),
    ("ministral3", "mistralai-Ministral-3-14B-Reasoning-2512", "mistral", "mistral"),
    ("nemotron_h", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "qwen3_coder", "deepseek_r1"),
    ("nemotron_h", "NVIDIA-Nemotron-Nano-v2", "nemotron_json", "deepseek_r1"),
    ("phimoe", "microsoft-Phi-3.5-mini-instruct", None, None),
    ("qwen3_5_text", "Qwen3.5-4B", "qwen3_coder", "deepseek_r1"),
    ("qwen3_next", "Qwen-Qwen3-0.6B", "hermes", "deepseek_r1"),  # Qwen3-Next has the same marks
]
"""Architectures of 2026, a published template of each, and the parsers of its tool calls and its reasoning."""


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The templates by name."""
    folder = tmp_path_factory.mktemp("sdist")
    package = ["--no-deps", "--no-binary", "llama-cpp-python", f"llama-cpp-python=={VERSION}"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", *package, "--dest", folder],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = {}
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        for member in archive:
            if FOLDER in member.name and member.name.endswith(".jinja"):
                file = archive.extractfile(member)
                assert file is not None
                found[Path(member.name).stem] = file.read().decode()
    return found


def test_published_templates_round_trip(templates: dict[str, str]) -> None:
    results: dict[str, RoundTrip] = {name: round_trip(template) for name, template in sorted(templates.items())}
    for name, result in results.items():
        words = "; ".join(result.problems) or "reads all"
        print(f"{name}: calls {result.calls}, reasoning {result.reasoning}: {words}", *result.omitted, sep=", omits ")
    failed = {name: result.problems for name, result in results.items() if result.problems}
    assert len(results) - len(failed) >= ENOUGH
    assert not {name: problems for name, problems in failed.items() if name not in KNOWN_PROBLEMS}


@pytest.mark.parametrize(("model_type", "name", "calls", "reasoning"), PARSERS)
def test_parsers_of_architectures(
    templates: dict[str, str], model_type: str, name: str, calls: str | None, reasoning: str | None
) -> None:
    assert tool_call_parser_for(templates[name], model_type) == calls
    assert reasoning_parser_for(templates[name], model_type) == reasoning
