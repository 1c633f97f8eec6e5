"""Contents of /metrics and their changes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import fakes
from ferrule._engine.metrics import Histogram
from ferrule.server import ServerSettings
from ferrule.server.metrics import buckets, cpu_stat
from server.live import Live, serving, until

# Metrics that vLLM's dashboards query.
KNOWN = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total"),
    *("generation_tokens_total", "num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
    *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket", "request_success_total"),
    *("e2e_request_latency_seconds_bucket", "request_queue_time_seconds_sum", "request_prefill_time_seconds_sum"),
    *("request_decode_time_seconds_sum", "request_prompt_tokens_bucket", "request_generation_tokens_sum"),
    *("cache_config_info", "request_params_n_bucket", "request_params_max_tokens_bucket"),
    "iteration_tokens_total_bucket",
)


def samples(live: Live) -> dict[str, float]:
    """Returns values by name and labels, except model and engine, which are constant."""
    found: dict[str, float] = {}
    answer = live.request("/metrics")
    assert answer.status == 200
    for family in text_string_to_metric_families(answer.body.decode()):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key not in ("model_name", "engine")}
            assert sample.labels.get("model_name", "tiny") == "tiny"
            found[f"{sample.name}{labels or ''}"] = sample.value
    return found


def test_vllm_prefix_gives_vllm_metric_names(engine: type[fakes.Engine]) -> None:
    with serving(ServerSettings(metrics_prefix="vllm:")) as live:
        assert live.chat(max_tokens=3).status == 200
        names = {name.partition("{")[0] for name in samples(live)}
        assert not {f"vllm:{name}" for name in KNOWN} - names
        assert all(name.startswith("vllm:") for name in names)


@pytest.mark.native
def test_tokens_of_steps_are_counted() -> None:
    with serving() as live:
        usage = live.complete("The capital of France is", max_tokens=4, ignore_eos=True).json["usage"]
        found = samples(live)
        assert found["ferrule:iteration_tokens_total_count"] == found["ferrule:engine_steps_total"]
        # The last token is generated but never computed.
        assert found["ferrule:iteration_tokens_total_sum"] == usage["total_tokens"] - 1
        assert found["ferrule:iteration_tokens_total_bucket{'le': '1.0'}"] == 3


@pytest.mark.native
def test_embedding_prompt_tokens_are_counted() -> None:
    with serving() as live:
        tokens = live.request("/v1/embeddings", {"input": ["The capital", "a"]}).json["usage"]["prompt_tokens"]
        until(lambda: samples(live).get("ferrule:e2e_request_latency_seconds_count") == 1)
        assert samples(live)["ferrule:request_prompt_tokens_count"] == 2
        assert samples(live)["ferrule:request_prompt_tokens_sum"] == tokens
        tokens += live.request("/v1/rerank", {"query": "a", "documents": ["b"]}).json["usage"]["prompt_tokens"]
        until(lambda: samples(live)["ferrule:e2e_request_latency_seconds_count"] == 2)
        assert samples(live)["ferrule:request_prompt_tokens_sum"] == tokens


@pytest.mark.parametrize("n", [1, 2])
def test_disconnected_requests_count_as_aborted(live: Live, engine: type[fakes.Engine], n: int) -> None:
    engine.step_seconds = 0.02
    body = json.dumps({"prompt": "Hi", "max_tokens": 500, "ignore_eos": True, "stream": True, "n": n})
    with live.connect() as client:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        assert b"200 OK" in client.recv(1000)
    until(lambda: samples(live).get("ferrule:request_success_total{'finished_reason': 'abort'}") == n)


def test_generated_tokens_and_requests_are_counted(live: Live) -> None:
    before = samples(live)
    assert live.chat(max_tokens=3, n=2).status == 200
    assert live.complete(["a", "b"], max_tokens=4, stream=True).status == 200
    assert live.chat(temperature=-1).status == 400
    until(lambda: "ferrule:http_requests_total{'status': '400'}" in samples(live))
    after = samples(live)

    def grown(name: str) -> float:
        return after[f"ferrule:{name}"] - before.get(f"ferrule:{name}", 0)

    assert grown("generation_tokens_total") == 2 * 3 + 2 * 4
    assert grown("request_success_total{'finished_reason': 'length'}") == 4
    assert grown("request_generation_tokens_sum") == 14
    assert (grown("request_params_n_sum"), grown("request_params_n_count")) == (4, 3)
    assert grown("request_params_max_tokens_sum") == 3 + 2 * 4
    assert grown("e2e_request_latency_seconds_count") == 2
    assert grown("http_requests_total{'status': '400'}") == 1
    assert grown("http_requests_total{'status': '200'}") >= 3  # the looks among them
    assert grown("engine_steps_total") * 20_000_000 == grown("weight_bytes_read_total")
    assert after["ferrule:weight_bytes_read_per_second"] > 0
    assert after["ferrule:threads"] == 1
    assert after["ferrule:engine_info{'isa': 'fake', 'kv_cache_dtype': 'auto', 'quantization': 'int8'}"] == 1
    assert (
        after["ferrule:time_to_first_token_seconds_count"]
        == after["ferrule:time_to_first_token_seconds_bucket{'le': '+Inf'}"]
    )


def test_settings_of_the_cache_are_labels(live: Live) -> None:
    (name,) = [name for name in samples(live) if "cache_config_info" in name]
    assert "'block_size': '16'" in name
    assert "'enable_prefix_caching': 'True'" in name
    assert f"'num_gpu_blocks': '{live.llm.metrics().pages_total}'" in name


def test_requests_without_a_limit_are_not_in_its_histogram(live: Live) -> None:
    assert live.chat(stop=["a"], max_tokens=None, seed=1).status == 200
    until(lambda: samples(live).get("ferrule:request_params_n_count") == 1)
    assert "ferrule:request_params_max_tokens_count" not in samples(live)


def test_metrics_contain_no_prompt_text(live: Live) -> None:
    live.complete("Xylophone", max_tokens=1, cache_salt="Zanzibar")
    assert not re.search(b"xylo|zanzi", live.request("/metrics").body, re.IGNORECASE)


def test_closed_engine_has_no_metrics(engine: type[fakes.Engine]) -> None:
    with serving() as live:
        live.llm.close()
        assert "ferrule:threads" not in samples(live)
        assert live.request("/health").status == 503


def test_buckets_are_cumulative() -> None:
    histogram = Histogram((0.1, 1.0), (2, 0, 3), 4.0, 5)
    assert buckets(histogram) == [("0.1", 2.0), ("1.0", 2.0), ("+Inf", 5.0)]


def test_cpu_stat(tmp_path: Path) -> None:
    stat = tmp_path / "cpu.stat"
    stat.write_text("usage_usec 5\nnr_periods 7\nnr_throttled 3\nthrottled_usec 9\nodd\n")
    assert cpu_stat([str(tmp_path / "none"), str(stat)])["nr_throttled"] == 3
    assert cpu_stat([str(tmp_path / "none")]) == {}


def test_cgroup_throttling_is_reported(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ferrule.server.metrics.cpu_stat", lambda: {"nr_throttled": 3, "throttled_usec": 2_500_000})
    found = samples(live)
    assert found["ferrule:cgroup_throttled_periods_total"] == 3
    assert found["ferrule:cgroup_throttled_seconds_total"] == 2.5


@pytest.mark.native
def test_weight_bandwidth_of_real_engine_is_plausible(tiny: Live) -> None:
    assert tiny.chat(max_tokens=3).status == 200
    found = samples(tiny)
    assert 1e6 < found["ferrule:weight_bytes_read_per_second"] < 1e13
