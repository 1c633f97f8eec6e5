"""`ferrule eval`: output, records, usage errors and exit codes."""

from __future__ import annotations

import builtins
import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fakes
from ferrule import LLM, InsufficientMemoryError
from ferrule._cli import main
from ferrule._cli.eval_report import record

TESTS = Path(__file__).parent
TEXT = "Once upon a time, there was a little cat. The capital of France is Paris.\n" * 20
FIGURES = {"perplexity", "perplexity_error", "nll", "nll_error", "tokens", "windows", "window", "stride", "min_context"}
ENDLESS = """
import sys, time, fakes
fakes.install()
def logits(self, *arguments):
    print("computing", file=sys.stderr, flush=True)
    time.sleep(600)
if "ENDLESS" in sys.argv:
    sys.argv.remove("ENDLESS")
    fakes.Engine.logits = logits
from ferrule._cli import main
sys.exit(main())
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["eval", *arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


@pytest.mark.native
def test_record_equals_library_result(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = evaluated(capsys, file, "--window", "64", "--stride", "16", "--min-context", "20", "--limit", "9")
    assert made.keys() == FIGURES | {"file", "model", "quantization", "kv_cache_dtype", "isa", "weight_bytes"}
    with LLM(max_model_len=64) as llm:
        found = llm.perplexity(TEXT, window=64, stride=16, min_context=20, limit=9)
    assert made["perplexity"] == found.perplexity
    assert (made["tokens"], made["windows"], made["stride"]) == (found.tokens, 9, 16)
    assert (made["file"], made["model"], made["quantization"]) == (file, "tiny", "int8")


@pytest.mark.native
def test_comparison_with_reference(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "divergence.svg"
    made = evaluated(
        capsys,
        *("tiny", file, "--quantization", "int4", "--reference-quantization", "f32", "--window", "64"),
        *("--worst", "4", "--plot", str(picture)),
    )
    assert made["reference"].keys() == made.keys() - {
        *("file", "reference", "kld", "worst"),
        *("perplexity_ratio", "perplexity_ratio_error", "same_top", "same_top_error"),
    }
    assert (made["quantization"], made["reference"]["quantization"]) == ("int4", "f32")
    assert list(made["kld"]) == ["mean", "error", "median", "p90", "p99", "p999", "max"]
    assert 0 < made["kld"]["mean"] < made["kld"]["max"] == made["worst"][0]["kld"]
    assert len(made["worst"]) == 4
    assert made["perplexity_ratio"] == pytest.approx(made["perplexity"] / made["reference"]["perplexity"])
    assert "<svg" in picture.read_text()
    same = evaluated(capsys, file, "--reference", "tiny", "--reference-quantization", "int8", "--window", "64")
    assert (same["kld"]["max"], same["same_top"]) == (0, 1)


def test_output_tables(file: str, fake_engine: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", file, "--window", "64"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.startswith("tiny  int8 weights")
    assert "perplexity  " in captured.out
    assert "windows of 64, stride 32" in captured.out
    assert main(["eval", file, "--window", "64", "--reference", "tiny", "--worst", "2"]) == 0
    out = capsys.readouterr().out
    assert "reference: tiny  f32 weights" in out
    for name in ("same top token", "divergence (KLD, nats)", "99.9 %", "maximum", "reference's top"):
        assert name in out
    assert max(map(len, out.splitlines())) <= 100
    assert main(["eval", file, "--window", "64", "--reference", "tiny", "--worst", "0"]) == 0
    assert "reference's top" not in capsys.readouterr().out


def test_plot_of_zero_divergence(
    file: str, tmp_path: Path, fake_engine: object, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "none.PNG"
    assert main(["eval", file, "--reference", "tiny", "--window", "64", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().err == ""


def test_text_from_stdin(
    fake_engine: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert evaluated(capsys, "-", "--window", "64")["file"] == "-"


def test_window_is_limited_by_context_length(
    file: str, fake_engine: object, model_with: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(model_with({"max_position_embeddings": 100}))
    assert evaluated(capsys, model, file, "--tokenizer", "tiny")["window"] == 100
    assert evaluated(capsys, file, "--max-model-len", "80")["window"] == 80
    Path(file).write_text(TEXT * 2)
    assert evaluated(capsys, file)["window"] == 512


BAD_FILES: list[tuple[bytes | None, str]] = [
    (b"", " must have text to predict, got an empty file"),
    (b" \n\n", " must have text to predict, got an empty file"),
    (b"fine until \xff here", " must be UTF-8 text; byte 11 is 0xff"),
    ("ä".encode("utf-16"), " must be UTF-8 text; byte 0 is 0xff"),
    (b"short", " must have at least 512 tokens, one window, got 1; give a longer text or lower --window"),
    (None, " cannot be read: No such file or directory"),
]


@pytest.mark.parametrize(("content", "message"), BAD_FILES)
def test_bad_files(
    content: bytes | None, message: str, tmp_path: Path, fake_engine: object, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file.txt"
    if content is not None:
        path.write_bytes(content)
    assert main(["eval", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {path}")
    assert message in captured.err
    assert captured.err.count("\n") == 1


USAGE: list[tuple[list[str], str]] = [
    ([], "expected [MODEL] FILE or --tasks, got 0 arguments"),
    (["a", "b", "c"], "expected [MODEL] FILE or --tasks, got 3 arguments"),
    (["/no/such/model", "x"], "no directory /no/such/model"),
    ([str(TESTS)], "Is a directory"),
    (["FILE", "--window", "1"], "1 is not in the range x>=2"),
    (["FILE", "--window", "9000"], "window must be at most 2048, the context length, got 9000"),
    (["FILE", "--window", "64", "--stride", "64"], "stride must be an integer from 1 to 63, got 64"),
    (["FILE", "--window", "64", "--min-context", "40"], "min_context must be an integer from 0 to 32, got 40"),
    (["FILE", "--reference", "/no/such/model"], "no directory /no/such/model"),
    (["FILE", "--plot", "x.png"], "--plot requires --compare, --reference or --reference-quantization"),
    (
        ["FILE", "--plot", "x.pdf", "--reference", "tiny"],
        "plot must be a file name that ends in .png or .svg, got 'x.pdf'",
    ),
    (["FILE", "--num-fewshot", "1"], "--num-fewshot requires --tasks"),
    (["FILE", "--apply-chat-template"], "--apply-chat-template requires --tasks"),
    (["--tasks", "x", "--window", "64"], "--window requires FILE; it has no effect with --tasks"),
    (["--tasks", "x", "a", "b"], "--tasks takes only MODEL, got 2 arguments"),
    (["--tasks", "x", "--include-path", "/no/such/folder"], "does not exist"),
    (["--compare", "int8", "FILE"], "expected [MODEL] FILE or --tasks before --compare, got 0 arguments"),
    (["FILE", "--compare", "int5"], "--compare must name formats (auto, f32, bf16, f16, int8, int4) or models, got"),
    (["FILE", "--compare", "int8@/no/such/model"], "no directory /no/such/model"),
    (["FILE", "--compare", "int8", "--worst", "3"], "--worst has no effect with --compare"),
    (["FILE", "--compare", "int8", "--quantization", "int4"], "--quantization has no effect with --compare"),
    (
        ["FILE", "--compare", "int8", "--plot", "x.pdf"],
        "plot must be a file name that ends in .png or .svg, got 'x.pdf'",
    ),
    (["--tasks", "x", "--compare", "int8"], "--compare requires FILE; it has no effect with --tasks"),
]


@pytest.mark.parametrize(("arguments", "message"), USAGE)
def test_usage_error_is_one_line(
    arguments: list[str], message: str, file: str, fake_engine: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *(file if word == "FILE" else word for word in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_reference_with_another_vocabulary(
    file: str, fake_engine: object, model_with: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    other = str(model_with({"vocab_size": 4000}))
    assert main(["eval", file, "--window", "64", "--reference", other]) == 2
    assert "reference must be a model with the vocabulary of tiny: 4096 tokens, not 4000" in capsys.readouterr().err


def test_insufficient_memory_for_reference(
    file: str, fake_engine: type[fakes.Engine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    init = fake_engine.__init__

    def second_is_too_large(
        self: fakes.Engine, spec: str, model_dir: str, options: str, *more: Any, **keywords: Any
    ) -> None:
        if json.loads(options)["quantization"] == "f32":
            raise InsufficientMemoryError("the weights need 9 bytes; 8 are available")
        init(self, spec, model_dir, options, *more, **keywords)

    monkeypatch.setattr(fake_engine, "__init__", second_is_too_large)
    assert main(["eval", file, "--window", "64", "--reference", "tiny"]) == 1
    assert "not enough memory for model and reference: the weights need 9 bytes" in capsys.readouterr().err


def test_tasks_without_lm_eval_are_reported(
    fake_engine: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without_harness(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "lm_eval":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.delitem(sys.modules, "ferrule.harness", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_harness)
    assert main(["eval", "--tasks", "arc_easy"]) == 2
    assert capsys.readouterr().err == "error: tasks require lm-evaluation-harness: pip install 'ferrule[eval]'\n"


def test_non_finite_figures_are_null() -> None:
    made = record({"model": "x"}, {"a": {"metrics": {"ppl": float("inf")}, "errors": {"ppl": float("nan")}}})
    assert made == {"model": "x", "tasks": {"a": {"metrics": {"ppl": None}, "errors": {"ppl": None}}}}


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ENDLESS, "eval", *arguments],
        cwd=TESTS,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_ctrl_c_exits_with_130(file: str) -> None:
    process = start(file, "--window", "64", "ENDLESS")
    assert process.stderr is not None
    assert process.stderr.readline() == "computing\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.strip()) == (130, "", "")


def test_closed_stdout_exits_silently(file: str) -> None:
    process = start(file, "--window", "64")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(60) == 1
    process.stderr.close()
