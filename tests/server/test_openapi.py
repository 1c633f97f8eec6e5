"""The server against its own description: whatever a client sends, no answer is a defect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, cast

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import RootModel
from schemathesis import GenerationMode

from ferrule import AsyncLLM
from ferrule.server import Models, ServerSettings, create_app
from ferrule.server.anthropic.protocol import ErrorBody
from ferrule.server.openai.protocol import ErrorResponse
from server.live import Live, serving

SETTINGS = ServerSettings(ollama=True)
DESCRIPTION: dict[str, Any] = create_app(Models(), SETTINGS).openapi()
OPERATIONS: list[Any] = [
    cast("Any", found).ok() for found in schemathesis.openapi.from_dict(DESCRIPTION).get_all_operations()
]
EXAMPLES = 20
"""Number of examples per operation and mode; about a minute in total."""
ERRORS = {"/v1/messages": ErrorBody, "/api/": RootModel[dict[Literal["error"], str]], "/": ErrorResponse}
"""The forms of errors, by the beginnings of paths."""


@pytest.fixture(scope="module")
def small() -> Iterator[Live]:
    """A context so short that whatever is asked ends soon."""
    with serving(SETTINGS, llm=lambda: AsyncLLM(max_model_len=48)) as live:
        yield live


def test_what_is_described() -> None:
    paths = DESCRIPTION["paths"]
    expected = {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/models", "/tokenize"}
    assert expected <= paths.keys()
    chat = DESCRIPTION["components"]["schemas"]["ChatCompletionRequest"]
    assert chat["additionalProperties"] is True
    assert chat["required"] == ["messages"]


@pytest.mark.native
@pytest.mark.parametrize(
    ("operation", "mode"),
    [
        (operation, mode)
        for operation in OPERATIONS
        for mode in GenerationMode
        if operation.method == "post" or mode is GenerationMode.POSITIVE  # without a body nothing can be wrong
    ],
    ids=str,
)
def test_no_answer_is_a_defect(small: Live, operation: Any, mode: GenerationMode) -> None:
    form = next(form for path, form in ERRORS.items() if operation.path.startswith(path))

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
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
