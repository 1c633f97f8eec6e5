"""The server against its own description: no request causes a server error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, cast

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, RootModel
from schemathesis import GenerationMode

from ferrule import AsyncLLM, SamplingParams
from ferrule._params.declaration import parameters
from ferrule.server import Models, ServerSettings, create_app
from ferrule.server.anthropic.protocol import ErrorBody
from ferrule.server.llama_cpp import PATHS
from ferrule.server.openai.protocol.errors import ErrorResponse
from server.live import Live, serving

SETTINGS = ServerSettings(ollama=True)
DESCRIPTION: dict[str, Any] = create_app(Models(), SETTINGS).openapi()
OPERATIONS: list[Any] = [
    cast("Any", found).ok() for found in schemathesis.openapi.from_dict(DESCRIPTION).get_all_operations()
]
EXAMPLES = 10
"""Number of examples per operation and mode."""
ERRORS: dict[str, type[BaseModel]] = {
    "/v1/messages": ErrorBody,
    "/api/": RootModel[dict[Literal["error"], str]],
    **dict.fromkeys(PATHS, RootModel[dict[Literal["error"], dict[str, Any]]]),
    "/": ErrorResponse,
}
"""Error schemas by path prefix."""


@pytest.fixture(scope="module")
def small() -> Iterator[Live]:
    """A server with a short context, so that every request ends soon."""
    with serving(SETTINGS, llm=lambda: AsyncLLM(max_model_len=48)) as live:
        yield live


def test_openapi_schema_describes_routes_and_fields() -> None:
    paths = DESCRIPTION["paths"]
    expected = {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/models", "/tokenize"}
    assert expected <= paths.keys()
    chat = DESCRIPTION["components"]["schemas"]["ChatCompletionRequest"]
    assert chat["additionalProperties"] is True
    assert chat["required"] == ["messages"]


@pytest.mark.parametrize(
    ("request_model", "own"),
    [
        ("ChatCompletionRequest", {"logprobs"}),
        ("CompletionRequest", {"max_tokens"}),
        ("ResponsesRequest", set[str]()),
        ("Options", set[str]()),
    ],
)
def test_sampling_fields_have_the_declared_descriptions(request_model: str, own: set[str]) -> None:
    """`own` are the fields with another meaning than the parameter of the same name."""
    found = DESCRIPTION["components"]["schemas"][request_model]["properties"]
    declared = {name: each.doc for name, each in parameters(SamplingParams).items() if name in found.keys() - own}
    assert {name: found[name].get("description") for name in declared} == declared


def test_bounds_and_json_types_of_sampling_fields() -> None:
    found = DESCRIPTION["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    limits = {"minimum", "maximum", "exclusiveMinimum"}
    bounds = {name: {key: field[key] for key in limits & field.keys()} for name, field in found.items()}
    assert bounds["n"] == {"minimum": 1, "maximum": 128}
    assert bounds["top_p"] == {"exclusiveMinimum": 0, "maximum": 1}
    assert bounds["ignore_eos"] == {}
    types = {name: [each.get("type") for each in field.get("anyOf", ())] for name, field in found.items()}
    assert types["n"] == ["integer", "null"]
    assert types["top_p"] == ["number", "null"]
    assert types["stop_token_ids"] == ["array", "null"]
    assert types["logit_bias"] == ["object", "null"]
    assert [each["type"] for each in found["stop"]["anyOf"][0]["oneOf"]] == ["string", "array"]
    assert [each["type"] for each in found["prediction"]["anyOf"][0]["oneOf"]] == ["string", "array", "object"]
    assert found["structured_outputs"]["anyOf"][0] == {"$ref": "#/components/schemas/StructuredOutputs"}
    options = DESCRIPTION["components"]["schemas"]["Options"]["properties"]
    assert options["repeat_penalty"]["description"] == found["repetition_penalty"]["description"]


@pytest.mark.native
@pytest.mark.parametrize(
    ("operation", "mode"),
    [
        (operation, mode)
        for operation in OPERATIONS
        for mode in GenerationMode
        # Without a body nothing can be wrong.
        if "requestBody" in DESCRIPTION["paths"][operation.path][operation.method] or mode is GenerationMode.POSITIVE
    ],
    ids=str,
)
def test_generated_requests_never_cause_server_errors(small: Live, operation: Any, mode: GenerationMode) -> None:
    form = next(form for path, form in ERRORS.items() if operation.path.startswith(path))

    @settings(
        max_examples=EXAMPLES,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @given(data=st.data())
    def ask(data: st.DataObject) -> None:
        case: Any = data.draw(operation.as_strategy(generation_mode=mode))
        answer = case.call(base_url=small.url, timeout=60)
        assert answer.status_code < 500 or answer.status_code == 503, (case.as_curl_command(), answer.text)
        if answer.status_code >= 400:
            form.model_validate_json(answer.content)

    ask()
    assert small.request("/health").status == 200
