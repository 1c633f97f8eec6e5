"""pytest plugin for llama.cpp's server tests: `ferrule serve` in place of `llama-server`.

It replaces how the tests' `ServerProcess` starts and stops. The options of llama-server become those of `ferrule
serve`, and a server goes on running for all tests with the same options. Defaults of sampling parameters, which
ferrule's server takes from the model only, are added to the requests instead. The expressions that the words of
llama.cpp's models match are not compared, because the models are others.

The environment variable SHIM is JSON: `ferrule`, the words of the command, and `models`, paths by purpose.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import time
import types
import urllib.request
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

sys.modules["wget"] = types.ModuleType("wget")  # downloads nothing here

import utils  # noqa: E402  # pyright: ignore[reportMissingImports]  # llama.cpp's

SETTINGS = json.loads(os.environ["SHIM"])
REPOSITORIES = {
    "ggml-org/test-model-stories260K": "text",
    "ggml-org/test-model-stories260K-infill": "text",
    "ggml-org/stories15M_MOE": "text",
}
FILES = {
    "bert-bge-small/ggml-model-f16.gguf": "embedding",
    "jina-reranker-v1-tiny-en/ggml-model-f16.gguf": "reranking",
}
GENERATING = (
    "/completion", "/completions", "/v1/completions", "/chat/completions", "/v1/chat/completions", "/infill",
    "/responses", "/v1/responses",
)  # fmt: skip
"""Routes whose requests have sampling parameters."""
LIMITS = ("n_predict", "max_tokens", "max_completion_tokens", "max_output_tokens")
UNSUPPORTED = (
    "model_draft", "enable_ctx_shift", "models_dir", "models_preset", "server_tools", "mcp_servers_config",
    "mcp_servers_json", "ui_mcp_proxy", "sleep_idle_seconds", "gcp_compat", "slot_save_path", "cache_ram", "model_tags",
    "media_path", "lora_files",
)  # fmt: skip
"""Options of llama-server that `ferrule serve` does not have."""
MAX_SERVERS = 6
"""Number of servers that run at the same time."""
START_SECONDS = 60


class Servers:
    """Running servers by their options, the one used last at the end."""

    def __init__(self) -> None:
        self._running: OrderedDict[tuple[str, ...], tuple[subprocess.Popen[bytes], int]] = OrderedDict()

    def port(self, words: tuple[str, ...], *, fresh: bool) -> int:
        """Returns the port of a server with the given options, which is started if none runs or it is to be fresh."""
        if fresh and words in self._running:
            self._stop(words)
        if words not in self._running:
            while len(self._running) >= MAX_SERVERS:
                self._stop(next(iter(self._running)))
            self._running[words] = _start(words)
        self._running.move_to_end(words)
        return self._running[words][1]

    def stop(self) -> None:
        """Stops all servers."""
        for words in list(self._running):
            self._stop(words)

    def _stop(self, words: tuple[str, ...]) -> None:
        process, _ = self._running.pop(words)
        process.kill()
        process.wait()


SERVERS = Servers()
atexit.register(SERVERS.stop)


def _start(words: tuple[str, ...]) -> tuple[subprocess.Popen[bytes], int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [*SETTINGS["ferrule"], "serve", *words, "--port", str(port)]
    print("command:", *command)
    process = subprocess.Popen(command)
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return process, port
        except OSError:
            time.sleep(0.05)
    process.kill()
    raise RuntimeError(f"the server did not start: {command}")


def options(server: Any) -> tuple[str, ...]:
    """Returns the options of `ferrule serve` for those of llama-server.

    Raises RuntimeError for an unsupported option or model.
    """
    given = [name for name in UNSUPPORTED if getattr(server, name)]
    if given:
        raise RuntimeError(f"ferrule serve has no option for {given}")
    purpose = FILES.get(server.model_hf_file) or REPOSITORIES.get(server.model_hf_repo)
    if purpose is None:
        raise RuntimeError(f"there is no model for {server.model_hf_repo} {server.model_hf_file}")
    slots = server.n_slots or 1
    found = [SETTINGS["models"][purpose], "--served-model-name", server.model_alias, "--max-num-seqs", str(slots)]
    if server.n_ctx:
        found += ["--max-model-len", str(server.n_ctx if server.kv_unified else server.n_ctx // slots)]
    if server.api_key:
        found += ["--api-key", server.api_key]
    if server.no_ui:
        found.append("--no-page")
    if server.chat_template or server.chat_template_file:
        found += ["--chat-template", server.chat_template or server.chat_template_file]
    if server.server_metrics:
        found += ["--metrics-prefix", "llamacpp:"]
    return tuple(found)


def start(server: Any, timeout_seconds: float = 0) -> None:
    """Starts the server, or takes a running one with the same options."""
    fresh = server.server_metrics or "cache" in os.environ["PYTEST_CURRENT_TEST"]  # tests that count tokens
    server.server_port = SERVERS.port(options(server), fresh=fresh)
    utils.server_instances.add(server)


def stop(server: Any) -> None:
    """Leaves the server to other tests."""
    utils.server_instances.discard(server)


def with_defaults(server: Any, path: str, data: Any) -> Any:
    """Returns a request with the defaults that llama-server has as options."""
    if not isinstance(data, dict):
        return data
    found = dict(data)
    if server.reasoning == "off":
        found.setdefault("chat_template_kwargs", {"enable_thinking": False})
    if path in GENERATING:
        found.setdefault("temperature", server.temperature)
        if not path.endswith("responses"):
            found.setdefault("seed", server.seed)
        if server.n_predict and not any(name in found for name in LIMITS) and "responses" not in path:
            found["max_tokens"] = server.n_predict
    return found


def _replace() -> None:
    make_request, make_stream_request = utils.ServerProcess.make_request, utils.ServerProcess.make_stream_request

    def request(server: Any, method: str, path: str, data: Any = None, *given: Any, **options: Any) -> Any:
        return make_request(server, method, path, with_defaults(server, path, data), *given, **options)

    def stream(server: Any, method: str, path: str, data: Any = None, *given: Any, **options: Any) -> Iterator[Any]:
        return make_stream_request(server, method, path, with_defaults(server, path, data), *given, **options)

    utils.ServerProcess.start, utils.ServerProcess.stop = start, stop
    utils.ServerProcess.make_request, utils.ServerProcess.make_stream_request = request, stream
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    utils.match_regex = lambda regex, text: isinstance(text, str)


_replace()
