"""/metrics with llama.cpp's names."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ferrule.server import ServerSettings
from ferrule.server.llama_cpp.metrics import PREFIX, ROWS, Rate
from server.live import Live, serving, until

pytestmark = pytest.mark.native


def values(live: Live) -> dict[str, float]:
    """Returns the metrics without labels, under llama.cpp's names without the prefix."""
    answer = live.request("/metrics")
    assert (answer.status, int(answer.headers["Process-Start-Time-Unix"])) == (200, live.server.models.created)
    families = text_string_to_metric_families(answer.body.decode())
    samples = [sample for family in families for sample in family.samples if not sample.labels]
    return {sample.name.removeprefix(PREFIX): sample.value for sample in samples}


def test_metrics_count_the_tokens_of_requests() -> None:
    with serving(ServerSettings(metrics_prefix=PREFIX)) as live:
        timings = [
            live.request("/completion", {"prompt": "a b c " * 20, "n_predict": 5, "ignore_eos": True}).json["timings"]
            for _ in range(2)
        ]
        until(lambda: not live.llm.metrics().running)
        found = values(live)
        assert found.keys() >= {row.name for row in ROWS}
        for name, field in (
            ("prompt_tokens_total", "prompt_n"),
            ("prompt_tokens_cached_total", "cache_n"),
            ("tokens_predicted_total", "predicted_n"),
        ):
            assert found[name] == sum(each[field] for each in timings), name
        assert found["prompt_tokens_cached_total"] > 0
        assert found["n_decode_total"] > 0
        # The parser adds _total to the names of counters.
        assert found["n_tokens_max_total"] == timings[0]["prompt_n"] + 5
        assert (found["requests_processing"], found["requests_deferred"]) == (0, 0)
        assert found["predicted_tokens_seconds"] > 0
        assert values(live)["predicted_tokens_seconds"] == 0


def test_rates_are_those_since_the_last_reading() -> None:
    rate = Rate()
    assert [rate.updated(10, 2), rate.updated(10, 2), rate.updated(16, 4)] == [5, 0, 3]
