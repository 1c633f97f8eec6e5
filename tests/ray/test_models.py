"""Several models in one application of Ray Serve."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from conftest import TINY
from ferrule import LLM, SamplingParams
from lora_files import random_adapter
from ray_server import SECONDS, ray_server

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the models."""
    return random_adapter(tmp_path_factory.mktemp("adapter") / "adapter", TINY)


@pytest.fixture(scope="module")
def client(
    ray_cluster: str, adapter: Path, long_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """A client of a server with one replica of each of two models."""
    models = ("--model", f"small={TINY}", "--model", f"large={long_model}", "--model", f"same={TINY}")
    adapters = ("--lora-modules", f"adapter={adapter}")
    with (
        ray_server(ray_cluster, *models, *adapters, log=tmp_path_factory.mktemp("models") / "stderr") as (url, _),
        httpx.Client(base_url=url, timeout=SECONDS, trust_env=False) as client,
    ):
        yield client


def complete(client: httpx.Client, model: str | None) -> tuple[str, str, str]:
    """Returns the replica, the model and the text of a completion."""
    request: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8}
    answer = client.post("/v1/completions", json=request if model is None else {**request, "model": model})
    assert answer.status_code == 200, answer.text
    return answer.headers["X-Ferrule-Replica"], answer.json()["model"], answer.json()["choices"][0]["text"]


@pytest.mark.native
def test_each_model_has_its_own_replica(client: httpx.Client) -> None:
    small, large, same, unnamed = (complete(client, name) for name in ("small", "large", "same", None))
    assert small[0] == same[0] == unnamed[0] != large[0]
    assert [each[1] for each in (small, large, same, unnamed)] == ["small", "large", "same", "small"]
    with LLM(TINY) as llm:
        expected = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text
    assert {each[2] for each in (small, large, same, unnamed)} == {expected}


@pytest.mark.native
def test_adapter_is_loaded_at_its_first_use(client: httpx.Client, adapter: Path) -> None:
    def loaded() -> list[float]:
        families = text_string_to_metric_families(client.get("/metrics").text)
        samples = (sample for family in families for sample in family.samples)
        return sorted(sample.value for sample in samples if sample.name == "ferrule:lora_adapters")

    assert loaded() == [0, 0]
    replica, model, text = complete(client, "adapter")
    assert (replica, model) == (complete(client, "small")[0], "adapter")
    assert loaded() == [0, 1]
    with LLM(TINY, lora_modules={"adapter": adapter}) as llm:
        output = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8), lora_request="adapter")[0]
    assert text == output.outputs[0].text


@pytest.mark.native
def test_all_models_are_described(client: httpx.Client) -> None:
    cards = [card for card in client.get("/v1/models").json()["data"] if "parent" not in card]
    limits = {card["id"]: card["max_model_len"] for card in cards}
    assert limits == {"small": limits["same"], "large": 32_768, "same": limits["small"]}
    assert client.get("/v1/models/large").json() == cards[[card["id"] for card in cards].index("large")]
    names = [tag["name"] for tag in client.get("/api/tags").json()["models"]]
    assert [name for name in names if name != "adapter"] == [card["id"] for card in cards]
    assert client.get("/props", params={"model": "large"}).json()["model_alias"] == "large"
    assert client.get("/health").json() == {"status": "ok"}
    families = text_string_to_metric_families(client.get("/metrics").text)
    assert len({sample.labels["replica"] for family in families for sample in family.samples}) == 2


@pytest.mark.native
def test_unknown_model_is_the_error_of_the_server(client: httpx.Client) -> None:
    error = {"type": "not_found_error", "param": "model", "code": "model_not_found"}
    message = "unknown model 'none'; choose one of: small, same, large, adapter"
    for answer in (
        client.post("/v1/completions", json={"model": "none", "prompt": "a"}),
        client.get("/v1/models/none"),
    ):
        assert (answer.status_code, answer.json()["error"]) == (404, {"message": message, **error})
