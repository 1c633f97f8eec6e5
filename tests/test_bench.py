"""`ferrule bench`: figures, disturbed runs, refused options, and output."""

from __future__ import annotations

import builtins
import json
import math
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fakes
from ferrule import model_info
from ferrule._api.llm import LLM
from ferrule._bench import measure
from ferrule._bench.machine import Ceilings, Machine, between
from ferrule._bench.measure import Arrivals, Point
from ferrule._bench.record import _latencies
from ferrule._bench.report import console
from ferrule._cli import main
from ferrule._loading.shapes import find_shape

PROMISED = {
    *("model", "format", "isa", "threads", "weight_bytes", "prefill_tokens", "prefill_tokens_per_second"),
    *("decode_tokens_per_second", "read_gbps", "int8_gops", "f32_gflops", "add_probe"),
    *("decode_bandwidth_fraction", "prefill_peak_fraction", "prefill_f32_fraction"),
}
TINY = ["--gen", "4", "--repeat", "1", "--json"]


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["bench", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def check_definitions(record: dict[str, Any], point: dict[str, Any]) -> None:
    """Computes the fractions from the other figures of the record; they are exact for a record of one run."""
    read, int8, f32 = 1e9 * point["read_gbps"], 1e9 * point["int8_gops"], 1e9 * point["f32_gflops"]
    steps = point["decode_tokens_per_second"] / point["batch"]
    operations = 2 * record["layer_parameters_per_token"] * point["prefill_tokens_per_second"]
    expected = {
        "decode_bandwidth_fraction": point["decode_step_bytes"] * steps / read,
        "prefill_peak_fraction": operations / int8,
        "prefill_f32_fraction": operations / f32,
        "decode_step_seconds": 1 / steps,
        "decode_step_over_weight_read": read / (steps * record["weight_bytes_per_token"]),
        "prefill_seconds_per_token": 1 / point["prefill_tokens_per_second"],
    }
    assert {name: point[name] for name in expected} == pytest.approx(expected)
    latencies = [point[f"inter_token_latency_{name}"] for name in ("p50", "p90", "p99", "max")]
    assert latencies == sorted(latencies)
    figures = [value for value in point.values() if isinstance(value, float)]
    assert all(math.isfinite(figure) and figure > 0 for figure in figures)


def test_record_has_documented_fields(fake_engine: object, capsys: pytest.CaptureFixture[str]) -> None:
    record = bench(capsys, "--prompt", "16", *TINY)
    assert set(record) >= PROMISED
    assert "points" not in record
    assert (record["model"], record["prefill_tokens"], record["decode_tokens"]) == ("tiny", 16, 4)
    # Three of the four tokens are decoded, with contexts of 17, 18 and 19 tokens.
    assert record["decode_step_bytes"] == record["weight_bytes_per_token"] + 18 * 16
    assert (record["read_gbps"], record["int8_gops"], record["f32_gflops"]) == (20, 1000, 100)
    check_definitions(record, record)


def test_sweep_measures_each_batch_at_each_context(fake_engine: object, capsys: pytest.CaptureFixture[str]) -> None:
    record = bench(capsys, "--context", "16,32", "--batch", "1, 3,1", *TINY)
    points = record["points"]
    assert [(p["prefill_tokens"], p["batch"]) for p in points] == [(16, 1), (16, 3), (32, 1), (32, 3)]
    assert points[0].items() <= record.items()
    for point in points:
        check_definitions(record, point)
        # 6 of the 16 bytes of a token belong to layers with a window of 32 tokens.
        context = point["prefill_tokens"] + 2
        kv = 10 * context + 6 * min(context, 32)
        assert point["decode_step_bytes"] == record["weight_bytes_per_token"] + point["batch"] * kv


def test_decode_step_reads_and_writes_the_states_of_all_sequences(
    fake_engine: type[fakes.Engine], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_engine.state_bytes = 1000
    record = bench(capsys, "--prompt", "16", "--batch", "3", *TINY)
    check_definitions(record, record)
    assert record["state_bytes"] == 1000
    assert record["decode_step_bytes"] == record["weight_bytes_per_token"] + 3 * (18 * 16 + 2 * 1000)
    assert main(["bench", "--prompt", "16", "--gen", "4", "--repeat", "1"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "weights and KV cache, reading and writing states / read bandwidth, 20.0 GB/s" in shown


PUBLISHED_SHAPES = {
    # Published number of parameters, those that this shape omits, parameters per token, and floats of the states: with
    # matrices, 16 for the scale of each 32 columns.
    "lfm2-1.2b": (1.17e9, 0, 1.17e9, 10 * 2 * 2048),
    "qwen3.5-4b": (4.21e9, 0, 4.21e9, 24 * (32 * (128 * 128 + 4 * 16) + 3 * 8192)),
    "granite-4-h-tiny": (6.94e9, 0, 1.46e9, 36 * (48 * (64 * 128 + 2 * 16) + 3 * 3328)),
    # 96 of the 128 experts of each layer are omitted.
    "nemotron-3-nano": (31.58e9, 23 * 96 * 2 * 2688 * 1856, 3.57e9, 23 * (64 * (64 * 128 + 2 * 16) + 3 * 6144)),
    # A token reads a row of the per-layer embeddings, not all 2.8 billion numbers.
    "gemma4-e4b": (7.46e9, 0, 4.64e9, 0),
}


@pytest.mark.parametrize("name", PUBLISHED_SHAPES)
def test_shapes_have_the_published_sizes(name: str) -> None:
    info = model_info(find_shape(name), load_format="dummy", quantization="int4")
    parameters, omitted, per_token, state_floats = PUBLISHED_SHAPES[name]
    assert info["parameters"] + omitted == pytest.approx(parameters, rel=0.005)
    assert info["parameters_per_token"] == pytest.approx(per_token, rel=0.005)
    assert info["state_bytes"] == 4 * state_floats
    # Experts that do not run are not read.
    is_sparse = per_token < 0.5 * parameters
    assert (info["weight_bytes_per_token"] < 0.5 * info["weight_bytes"]) == is_sparse


def test_runs_do_not_hit_prefix_cache(
    fake_engine: type[fakes.Engine], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cached: list[int] = []
    finish = fakes.Engine._finish

    def note(self: fakes.Engine, request_id: int, reason: str) -> None:
        cached.append(self.running[request_id].cached)
        finish(self, request_id, reason)

    monkeypatch.setattr(fake_engine, "_finish", note)
    bench(capsys, "--context", "64", "--batch", "2", *TINY, "--repeat", "2")
    assert len(cached) > 4
    assert not any(cached)


def test_sequences_have_distinct_prompts(
    fake_engine: type[fakes.Engine], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[list[int]] = []
    add = fakes.Engine.add_request

    def note(self: fakes.Engine, prompt_token_ids: list[int], *more: Any) -> int:
        prompts.append(prompt_token_ids)
        return add(self, prompt_token_ids, *more)

    monkeypatch.setattr(fake_engine, "add_request", note)
    bench(capsys, "--context", "24", "--batch", "4", *TINY)
    measured = [prompt for prompt in prompts if len(prompt) == 24][-4:]
    assert len({tuple(prompt) for prompt in measured}) == 4


def test_real_engine_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    record = bench(capsys, "--context", "20,33", "--batch", "1,3", "--threads", "1", *TINY)
    assert set(record) >= PROMISED
    assert len(record["points"]) == 4
    for point in record["points"]:
        check_definitions(record, point)


class Clock:
    """Replaces `time.perf_counter` by the next value of a list."""

    def __init__(self, times: Sequence[float]) -> None:
        self._times = iter(times)

    def __call__(self) -> float:
        return next(self._times)


CEILINGS = Ceilings(1.0, 2.0, 3.0, 4.0)


def arrivals(monkeypatch: pytest.MonkeyPatch, point: Point, events: Sequence[tuple[float, int, int]]) -> Arrivals:
    """Returns the record of tokens at given times: time, sequence, count."""
    monkeypatch.setattr(time, "perf_counter", Clock([at for at, _, _ in events]))
    arrived = Arrivals(point)
    for number, (_, sequence, count) in enumerate(events):
        assert not arrived.complete, f"complete before event {number}"
        arrived.add(sequence, count)
    assert arrived.complete
    return arrived


def test_decode_time_of_one_sequence_starts_at_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    run = arrivals(monkeypatch, Point(10, 1, 4), [(3, 0, 1), (4, 0, 1), (6, 0, 1), (9, 0, 1)]).run(1, CEILINGS)
    assert (run.prefill_seconds, run.first_token_seconds, run.decode_seconds) == (2, 2, 6)
    assert run.gaps == [1, 2, 3]
    assert run.contexts == [statistics.mean([11, 12, 13])]


def test_decode_time_counts_only_while_all_sequences_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that the first sequence generates during the prefill of the second one do not count."""
    events = [(2, 0, 1), (4, 0, 1), (6, 0, 1), (6.5, 1, 1), (7, 0, 1), (7.5, 1, 1), (9, 0, 1), (9.5, 1, 1)]
    run = arrivals(monkeypatch, Point(10, 2, 3), events).run(1, CEILINGS)
    assert (run.prefill_seconds, run.first_token_seconds, run.decode_seconds) == (5.5, 1, 3)
    assert run.gaps == [1, 2, 1, 2]
    assert run.contexts == [statistics.mean([13, 14]), statistics.mean([11, 12])]


def test_step_with_several_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    run = arrivals(monkeypatch, Point(10, 1, 4), [(3, 0, 1), (4, 0, 2), (6, 0, 2)]).run(1, CEILINGS)
    assert run.decode_seconds == 3
    assert run.gaps == [1, 0, 2]


def test_sequence_ending_early_is_an_error(fake_engine: type[fakes.Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """A context that ends before all sequences have their tokens is an error."""
    from ferrule.errors import EngineError

    with LLM(max_model_len=20) as llm, pytest.raises(EngineError, match="end of the context"):
        measure._run(llm, Point(16, 1, 8), llm.info()["vocab_size"])


@pytest.mark.parametrize("count", [1, 2, 3, 99, 100, 101, 1000])
def test_percentiles_equal_numpy(count: int) -> None:
    gaps = np.random.default_rng(count).random(count)
    latencies = _latencies(gaps.tolist())
    expected = np.quantile(gaps, [0.5, 0.9, 0.99, 1.0], method="inverted_cdf")
    assert list(latencies.values()) == expected.tolist()


def test_ceilings_of_a_run_are_means_of_neighboring_windows() -> None:
    assert between(Ceilings(10, 20, 30, 40), Ceilings(20, 40, 20, 30)) == Ceilings(15, 30, 25, 30)


def windows(monkeypatch: pytest.MonkeyPatch, adds: Sequence[float]) -> None:
    """Makes the machine measure these rates of additions in turn, and then always the last one."""
    left: Iterator[float] = iter(adds)
    last = adds[-1]

    def see(self: Machine, *, alone: bool = False) -> Ceilings:
        seen = Ceilings(20e9, 1e12, 1e11, next(left, last))
        self._most_adds[alone] = max(self._most_adds[alone], seen.adds)
        return seen

    monkeypatch.setattr(Machine, "measure", see)


def test_runs_in_bad_windows_are_repeated(
    fake_engine: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # There are six measurements around five runs. The third one is bad, so the runs before and after it are bad too.
    windows(monkeypatch, [10e9, 10e9, 8e9, 10e9, 9e9, 10e9])
    record = bench(capsys, "--prompt", "16", "--gen", "4", "--repeat", "3", "--json")
    assert (record["runs_repeated"], record["runs_in_bad_windows"]) == (2, 0)
    assert record["add_probe"] == 9  # the lower of the rates before and after


def test_repeated_runs_are_limited(
    fake_engine: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    windows(monkeypatch, [10e9, 1e9])
    record = bench(capsys, "--prompt", "16", "--gen", "4", "--repeat", "3", "--json")
    assert (record["runs_repeated"], record["runs_in_bad_windows"]) == (3, 3)
    windows(monkeypatch, [10e9, 1e9])
    assert main(["bench", "--prompt", "16", "--gen", "4"]) == 0
    assert "3 runs repeated" in capsys.readouterr().out


def test_earlier_windows_are_judged_by_later_maximum(
    fake_engine: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    windows(monkeypatch, [5e9, 5e9, 10e9, 10e9])
    record = bench(capsys, "--prompt", "16", "--gen", "4", "--repeat", "2", "--json")
    assert (record["runs_repeated"], record["runs_in_bad_windows"]) == (2, 0)


def test_machine_benchmark(fake_engine: object, capsys: pytest.CaptureFixture[str]) -> None:
    record = bench(capsys, "--machine", "--threads", "4", "--json")
    assert {"isa", "threads", "read_gbps", "int8_gops", "f32_gflops", "add_probe"} <= set(record)
    assert (record["isa"], record["threads"], record["int8_gops"]) == ("fake", 4, 4000)
    assert record["one_thread"]["int8_gops"] == 1000
    assert record["scaling"] == {"read_gbps": 1, "int8_gops": 4, "f32_gflops": 4, "add_probe": 4}
    for arguments, columns in ((["--threads", "4"], "1 thread  4 threads"), (["--threads", "1"], "1 thread\n")):
        assert main(["bench", "--machine", *arguments]) == 0
        assert columns in capsys.readouterr().out


def test_machine_benchmark_on_real_engine(capsys: pytest.CaptureFixture[str]) -> None:
    record = bench(capsys, "--machine", "--repeat", "1", "--json")
    figures = [record["one_thread"][name] for name in ("read_gbps", "int8_gops", "f32_gflops", "add_probe")]
    assert all(figure > 0 for figure in figures)
    assert record["read_probe_bytes"] > 0


BAD: list[tuple[list[str], str]] = [
    (["--batch", "0"], "must be integers from 1 to 256, separated by commas, got '0'"),
    (["--batch", "x"], "must be integers from 1 to 256, separated by commas, got 'x'"),
    (["--batch", "1,,2"], "must be integers from 1 to 256, separated by commas, got ''"),
    (["--batch", "-1"], "must be integers from 1 to 256, separated by commas, got '-1'"),
    (["--batch", "257"], "must be integers from 1 to 256, separated by commas, got '257'"),
    (["--context", "0x10"], "must be integers from 1 to 2147483647, separated by commas, got '0x10'"),
    (["--context", "9" * 5000], "must be integers from 1 to 2147483647, separated by commas, got '999"),
    (
        ["--context", "512,5000"],
        "context must be at most max_model_len (2048) together with 128 generated tokens, got 5000",
    ),
    (["--context", "1915", "--batch", "4"], "of them while the other prompts are computed), got 1915"),
    (
        ["--context", "1024", "--batch", "4"],
        "batch must be at most 3 with 1160 tokens each: the KV cache holds 4096 tokens, got 4",
    ),
    (["--repeat", "0"], "0 is not in the range"),
    (["--shape", "llama-2b"], "'llama-2b' is not one of"),
    (["--shape", "llama-1b", "tiny"], "give MODEL or --shape, not both"),
    (["--machine", "tiny"], "MODEL has no effect with --machine"),
    (["--machine", "--batch", "2"], "--batch has no effect with --machine"),
    (["--machine", "--quantization", "f32"], "--quantization has no effect with --machine"),
    (["--plot", "/no/such/folder/x.png"], "plot must be a file in an existing directory, got '/no/such/folder/x.png'"),
    (["--plot", "x.pdf"], "plot must be a file name that ends in .png or .svg, got 'x.pdf'"),
    (["--compare", "/no/such/record"], "compare must be a readable file (No such file or directory), got"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_invalid_arguments(
    arguments: list[str], message: str, fake_engine: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "compare must be a file of valid JSON ("),
        (b"ferrule bench --json\n{}", "compare must be a file of valid JSON ("),
        (b"\xff\xfe", "compare must be a file of valid JSON ("),
        (b"[]", "compare must be a record that ferrule bench --json wrote, got"),
        (b"{}", "compare must be a record that ferrule bench --json wrote, got"),
        (b'{"points": 3}', "compare must be a record that ferrule bench --json wrote, got"),
        (b'{"points": [3, null]}', "compare must be a record that ferrule bench --json wrote, got"),
        (
            b'{"prefill_tokens": 16, "read_gbps": 20.0}',
            "compare must be a record of 1 x 512 tokens (this one is of 1 x 16 tokens), got",
        ),
        (
            b'{"read_gbps": 20.0, "one_thread": {"read_gbps": 10.0}}',
            "compare must be a record of 1 x 512 tokens (this one is of all threads, one thread), got",
        ),
    ],
)
def test_invalid_comparison_record(
    content: bytes, message: str, fake_engine: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(content)
    measured = fakes.Ceilings.measured
    assert main(["bench", "--compare", str(path)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert fakes.Ceilings.measured == measured  # the error comes before any measurement


def test_comparison_with_record(fake_engine: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--context", "16,32", *TINY]
    old = bench(capsys, *arguments)
    for point in (old, *old["points"]):
        point["read_gbps"] /= 2
    old |= {"isa": "slower", "threads": 7}
    path = tmp_path / "record.json"
    path.write_text(json.dumps(old))
    new = bench(capsys, *arguments, "--compare", str(path))["compared"]
    assert new["differs"] == {"isa": {"old": "slower", "new": "fake"}, "threads": {"old": 7, "new": 1}}
    read = [change for change in new["changes"] if change["figure"] == "read_gbps"]
    assert [(c["point"], c["old"], c["new"], c["ratio"]) for c in read] == [
        ("1 x 16 tokens", 10, 20, 2),
        ("1 x 32 tokens", 10, 20, 2),
    ]
    assert main(["bench", "--context", "16", "--gen", "4", "--compare", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "isa differs: slower (old), fake (new)" in shown
    assert "read gbps" in shown
    assert "2.000" in shown


def test_comparison_of_machine_benchmark(
    fake_engine: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(bench(capsys, "--machine", "--json")))
    changes = bench(capsys, "--machine", "--json", "--compare", str(path))["compared"]["changes"]
    assert {change["point"] for change in changes} == {"all threads", "one thread", "scaling"}
    assert {change["ratio"] for change in changes} == {1.0}


def test_plot_writes_png(fake_engine: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "roof [line].png"
    bench(capsys, "--context", "16,32", "--batch", "1,2", *TINY, "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_is_reported(
    fake_engine: object, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = builtins.__import__

    def without_matplotlib(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(name)
        return real_import(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    assert main(["bench", "--plot", str(tmp_path / "x.png")]) == 2
    assert capsys.readouterr().err == "error: plots require matplotlib: pip install 'ferrule[plot]'\n"


@pytest.mark.parametrize(
    "arguments", [["--machine"], ["--context", "16,1024", "--batch", "1,2", "--gen", "4", "--compare", "record.json"]]
)
def test_output_fits_narrow_terminal(
    arguments: list[str],
    fake_engine: type[fakes.Engine],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    record = bench(capsys, "--context", "16,1024", "--batch", "1,2", *TINY)
    (tmp_path / "record.json").write_text(json.dumps(record))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    fake_engine.step_seconds = 0.002
    assert console().is_terminal
    assert main(["bench", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown  # nothing was cut


def test_ctrl_c_exits_with_130() -> None:
    program = """
import sys, fakes
fakes.install()
fakes.Engine.step_seconds = 0.01
from ferrule._cli import main
print("ready", flush=True)
sys.exit(main(["bench", "--repeat", "1000"]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=Path(__file__).parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors.strip()) == (130, b"", b"")
