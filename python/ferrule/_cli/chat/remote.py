"""Answers from a server of OpenAI's API, requested with the standard library."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast
from urllib.parse import urlsplit, urlunsplit

import click

from ferrule._cli.chat.answers import Delta, Usage, is_visible, limit_notice
from ferrule._cli.chat.conversation import parameter_fields
from ferrule._cli.status import StatusLine
from ferrule._params.sampling import SamplingParams
from ferrule._validation import shown
from ferrule.errors import InvalidParameterError, RemoteError

FIRST_TIMEOUT = 10.0
"""Timeout of the list of models, in seconds."""
TIMEOUT = 600.0
"""Timeout between events of an answer, in seconds. It is long because prefill of a long prompt takes time."""
MAX_LINE_BYTES = 16 << 20
"""Maximum size of an event, a list of models or an error, in bytes."""


class RemoteAnswers:
    """Answers of a model on a server (default: the server's first model).

    Raises InvalidParameterError for an invalid URL, click.UsageError for an invalid API key, and RemoteError if the
    server is unreachable or has no models.
    """

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        self._base = _checked_url(url)
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise click.UsageError("--api-key must be printable ASCII characters, which an HTTP header can hold")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self.context: int | None = None
        self.name = model or ""
        models = self._models()
        if model is None:
            if not models:
                raise RemoteError(f"{self._base}/models: the server has no models")
            self.name = str(models[0].get("id"))
        for each in models:
            # max_model_len is a field of vLLM's and ferrule's lists of models.
            if each.get("id") == self.name and isinstance(each.get("max_model_len"), int):
                self.context = each["max_model_len"]

    def defaults(self, params: SamplingParams) -> dict[str, Any]:  # the server does not report them
        """Implements `Answers.defaults`."""
        return {}

    def stream(self, messages: Sequence[dict[str, Any]], params: SamplingParams) -> Generator[Delta, None, None]:
        """Implements `Answers.stream`. Raises RemoteError."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": self.name, "messages": list(messages), **options, **parameter_fields(params)}
        began = time.monotonic()
        first: float | None = None
        finished: str | None = None
        usage: Mapping[str, Any] = {}
        with (
            StatusLine(f"waiting for {self.name}") as status,
            self._request("chat/completions", TIMEOUT, body) as response,
        ):
            for event in _events(response, f"{self._base}/chat/completions"):
                usage = _object(event.get("usage")) or usage
                for choice in _objects(event.get("choices")):
                    delta = _object(choice.get("delta"))
                    finished = choice.get("finish_reason") or finished
                    # DeepSeek and OpenRouter have different names for the field.
                    reasoning = str(delta.get("reasoning_content") or delta.get("reasoning") or "")
                    content = str(delta.get("content") or "")
                    if content or reasoning:
                        first = time.monotonic() if first is None else first
                        if is_visible(content, reasoning):
                            status.clear()
                        yield Delta(content, reasoning)
        answered = _usage(usage, began, first, finished)
        limited = finished == "length" and params.max_tokens is None
        yield Delta(usage=answered, notice=self._limit_notice(answered) if limited else "")

    def _limit_notice(self, usage: Usage) -> str:
        """Returns the notice of the server's limit; empty at the context length, which no option raises."""
        read, written = usage.prompt_tokens, usage.output_tokens
        if self.context is not None and read is not None and written is not None and read + written >= self.context:
            return ""
        tokens = "" if written is None else f" of {written:,} tokens"
        return limit_notice(f"the server's limit{tokens}")

    def _models(self) -> list[dict[str, Any]]:
        with self._request("models", FIRST_TIMEOUT) as response:
            answer = _json(response.read(MAX_LINE_BYTES), f"{self._base}/models")
        return _objects(answer.get("data"))

    @contextmanager
    def _request(
        self, path: str, timeout: float, body: Mapping[str, Any] | None = None
    ) -> Generator[http.client.HTTPResponse, None, None]:
        """Yields the response of the server. Raises RemoteError, also for a failure while the response is read."""
        url = f"{self._base}/{path}"
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, "Content-Type": "application/json", "User-Agent": "ferrule"}
        request = urllib.request.Request(url, data, headers)  # noqa: S310  # the scheme was checked
        try:
            with _opener().open(request, timeout=timeout) as response:
                yield response
        except RemoteError:  # raised while the response was read
            raise
        except urllib.error.HTTPError as error:
            with error:
                raise RemoteError(f"{url}: {error.code} {error.reason}: {_message(error)}") from error
        except urllib.error.URLError as error:
            raise RemoteError(f"{url}: cannot be reached: {error.reason}") from error
        except TimeoutError as error:
            raise RemoteError(f"{url}: no response within {timeout:g} seconds") from error
        except (OSError, http.client.HTTPException) as error:
            raise RemoteError(f"{url}: {type(error).__name__}: {error}") from error


def _opener() -> urllib.request.OpenerDirector:
    """Creates an opener that uses the environment's proxies and follows no redirects, which would forward the key."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.HTTPDefaultErrorHandler,
    ):
        opener.add_handler(handler())
    return opener


def _object(value: object) -> dict[str, Any]:
    """Returns the value if it is an object, else an empty object."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _objects(value: object) -> list[dict[str, Any]]:
    """Returns the value if it is a list of objects, else an empty list."""
    return [_object(each) for each in cast("list[object]", value)] if isinstance(value, list) else []


def _checked_url(url: str) -> str:
    """Normalizes a URL: removes a trailing slash, and adds /v1 where the path is empty."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname is not None and (parts.port or 1) > 0
    except ValueError:  # an invalid port
        valid = False
        parts = urlsplit("")
    if not valid or parts.query or parts.fragment or parts.username or any(ord(each) <= 0x20 for each in url):
        raise InvalidParameterError("url", url, "an HTTP URL such as http://127.0.0.1:8000/v1")
    return urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/") or "/v1", "", ""))


def _events(response: http.client.HTTPResponse, url: str) -> Iterator[dict[str, Any]]:
    """Parses server-sent events as objects (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""
    ended = False
    while line := response.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise RemoteError(f"{url}: an event has more than {MAX_LINE_BYTES} bytes, the limit")
        field, _, value = line.strip().partition(b":")
        if field != b"data":
            continue
        if value.strip() == b"[DONE]":
            ended = True
            break
        event = _json(value, url)
        if event.get("error"):
            raise RemoteError(f"{url}: {_text_of(event)}")
        yield event
    if not ended:
        raise RemoteError(f"{url}: the response ended before [DONE]")


def _json(content: bytes, url: str) -> dict[str, Any]:
    try:
        answer: object = json.loads(content)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        hint = "check that the URL is the base URL of an OpenAI API"
        raise RemoteError(f"{url}: response is not a JSON object: {shown(content)}; {hint}")
    return cast("dict[str, Any]", answer)


def _message(error: urllib.error.HTTPError) -> str:
    """Returns the message of an error response."""
    try:
        content = error.read(MAX_LINE_BYTES)
        return _text_of(_json(content, ""))
    except (OSError, http.client.HTTPException, RemoteError):
        return "no error message"


def _text_of(answer: Mapping[str, Any]) -> str:
    """Returns OpenAI's `error.message`, or the most similar field."""
    error: object = answer.get("error") or answer.get("detail") or answer
    message: object = _object(error).get("message", error)
    return message if isinstance(message, str) else shown(error)


def _usage(usage: Mapping[str, Any], began: float, first: float | None, finished: str | None) -> Usage:
    read, written = usage.get("prompt_tokens"), usage.get("completion_tokens")
    parts = [] if read is None else [f"prompt {read} tokens"]
    if first is not None:
        parts.append(f"first token after {first - began:.3f} s")
    if isinstance(written, int):
        parts.append(f"{written} tokens")
        if first is not None and written > 1:
            parts.append(f"{(written - 1) / max(time.monotonic() - first, 1e-9):.1f} tokens/s")
    parts.append(finished or "interrupted")
    return Usage(
        f"[{', '.join(parts)}]",
        read if isinstance(read, int) else None,
        written if isinstance(written, int) else None,
    )
