"""pytest plugin for llama.cpp's server tests: `ferrule serve` in place of `llama-server`.

It replaces how the tests' `ServerProcess` starts and stops. The options of llama-server become those of `ferrule
serve`, and a server goes on running for all tests with the same options. Defaults of sampling parameters, which
ferrule's server takes from the model only, are added to the requests instead. So is `ignore_eos` for completions: the
model here ends its text earlier than llama.cpp's, whose tests count tokens. The expressions that the words of
llama.cpp's models match are not compared, because the models are others.

The environment variable SHIM is JSON: `ferrule`, the words of the command, `models`, paths by purpose, and `remaining`,
the tests to leave out by module: functions, or functions with their parameters.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
import types
import urllib.request
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from requests.structures import CaseInsensitiveDict

SETTINGS = json.loads(os.environ["SHIM"])


def _link(url: str, out: str) -> None:
    """Puts a model of this project in the place of a file that the tests download."""
    Path(out).parent.mkdir(exist_ok=True)
    Path(out).symlink_to(SETTINGS["models"][DOWNLOADS[url.rpartition("/")[2]]])


DOWNLOADS = {"stories15M-q4_0.gguf": "text"}
"""Purposes of the models in place of files that the tests download, by name."""
sys.modules["wget"] = types.ModuleType("wget")
sys.modules["wget"].download = _link  # pyright: ignore[reportAttributeAccessIssue]

import utils  # noqa: E402  # pyright: ignore[reportMissingImports]  # llama.cpp's

REPOSITORIES = {
    "ggml-org/test-model-stories260K": "text",
    "ggml-org/test-model-stories260K-infill": "text",
    "ggml-org/stories15M_MOE": "text",
    None: "text",  # the model is that of a request
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
CHATS = ("/chat/completions", "/v1/chat/completions")
"""Routes whose requests have messages in OpenAI's form, with fields about the output."""
COMPLETIONS = ("/completion", "/completions", "/v1/completions", *CHATS)
"""Routes whose outputs are as long as the request says."""
CLOUD_MODELS = (
    *("codellama70b", "davinci-002", "gpt-3.5-turbo", "gpt-3.5-turbo-instruct", "gpt-4.1", "test"),
    "text-embedding-3-small",
)
"""Names of models in the tests' requests; llama-server accepts every name."""
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "command-r": "{% for m in messages %}<|START_OF_TURN_TOKEN|><|{{ 'CHATBOT' if m.role == 'assistant' else "
    "m.role.upper() }}_TOKEN|>{{ m.content }}<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}",
    "llama3": "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
}
"""Chat templates that llama-server has under a name."""
LIMITS = ("n_predict", "max_tokens", "max_completion_tokens", "max_output_tokens")
UNSUPPORTED = (
    "spec_synth_rates", "enable_ctx_shift", "models_dir", "models_preset", "server_tools", "mcp_servers_config",
    "mcp_servers_json", "ui_mcp_proxy", "sleep_idle_seconds", "gcp_compat", "slot_save_path", "cache_ram", "model_tags",
    "media_path", "lora_files",
)  # fmt: skip
"""Options of llama-server that `ferrule serve` does not have."""
MAX_SERVERS = 6
"""Number of servers that run at the same time."""
START_SECONDS = 120
PORTS = range(20_000, 30_000)


class Servers:
    """Running servers by their options, the one used last at the end."""

    def __init__(self) -> None:
        self._running: OrderedDict[tuple[str, ...], tuple[subprocess.Popen[bytes], int]] = OrderedDict()

    def port(self, words: tuple[str, ...], *, fresh: bool) -> int:
        """Returns the port of a server with the given options, which is started if none runs or it is to be fresh."""
        if fresh and words in self._running:
            self._stop(words)
        if words not in self._running:
            self._begin(words, _free_port())
        self._running.move_to_end(words)
        return self._running[words][1]

    def restart(self, port: int, words: tuple[str, ...]) -> None:
        """Puts a server with the given options in the place of the one at a port, for tests that keep its address."""
        for each in (words, *(each for each, (_, used) in self._running.items() if used == port)):
            if each in self._running:
                self._stop(each)
        self._begin(words, port)

    def stop(self) -> None:
        """Stops all servers."""
        for words in list(self._running):
            self._stop(words)

    def _begin(self, words: tuple[str, ...], port: int) -> None:
        while len(self._running) >= MAX_SERVERS:
            self._stop(next(iter(self._running)))
        self._running[words] = (_start(words, port), port)

    def _stop(self, words: tuple[str, ...]) -> None:
        process, _ = self._running.pop(words)
        process.kill()
        process.wait()


SERVERS = Servers()
atexit.register(SERVERS.stop)


def _free_port() -> int:
    """Returns a port outside of the range from which the system chooses ports for other programs."""
    for port in random.sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise RuntimeError("no free port")


def _start(words: tuple[str, ...], port: int) -> subprocess.Popen[bytes]:
    command = [*SETTINGS["ferrule"], "serve", *words, "--port", str(port)]
    print("command:", *command)
    process = subprocess.Popen(command)
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60):
                return process
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
    found = [SETTINGS["models"][purpose], "--max-num-seqs", str(slots)]
    for name in (server.model_alias or purpose, *_other_names()):
        found += ["--served-model-name", name]
    if server.n_ctx:
        found += ["--max-model-len", str(server.n_ctx if server.kv_unified else server.n_ctx // slots)]
    if server.api_key:
        found += ["--api-key", server.api_key]
    found += ["--allowed-origin", server.cors_origins or "*"]
    if server.model_draft:
        found += ["--speculative-model", server.model_draft, "--speculative-tokens", str(server.spec_draft_n_max)]
    if server.no_ui:
        found.append("--no-page")
    if not server.server_slots:
        found.append("--no-slots")
    if server.chat_template or server.chat_template_file:
        template = TEMPLATES.get(server.chat_template, server.chat_template)
        found += ["--chat-template", template or server.chat_template_file]
    if server.server_metrics:
        found += ["--metrics-prefix", "llamacpp:"]
    return tuple(found)


def _test() -> str:
    return os.environ["PYTEST_CURRENT_TEST"]


def _other_names() -> Sequence[str]:
    """Returns further names of the model; none in the tests that list models."""
    return () if "models" in _test() else CLOUD_MODELS


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leaves out tests by their exact names; `--deselect` takes every test whose name begins with the given one."""
    remaining = {
        id(item) for item in items if {item.name, item.originalname} & SETTINGS["remaining"][item.path.stem].keys()
    }
    config.hook.pytest_deselected(items=[item for item in items if id(item) in remaining])
    items[:] = [item for item in items if id(item) not in remaining]


def start(server: Any, timeout_seconds: float = 0) -> None:
    """Starts the server, or takes a running one with the same options."""
    words = options(server)
    if getattr(server, "words", words) != words:
        SERVERS.restart(server.server_port, words)
    else:
        fresh = server.server_metrics or "cache" in _test()  # tests that count tokens
        server.server_port = SERVERS.port(words, fresh=fresh)
    server.words = words
    utils.server_instances.add(server)


def stop(server: Any) -> None:
    """Leaves the server to other tests."""
    utils.server_instances.discard(server)


def with_defaults(server: Any, path: str, data: Any) -> Any:
    """Returns a request with the defaults that llama-server has as options."""
    if not isinstance(data, dict):
        return data
    found = dict(data)
    if path in (*CHATS, "/apply-template"):
        found.setdefault("chat_template_kwargs", {"enable_thinking": server.reasoning != "off"})
    if path in CHATS:
        _add_chat_defaults(server, found)
    if path in GENERATING:
        found.setdefault("temperature", server.temperature)
        if not path.endswith("responses"):
            found.setdefault("seed", server.seed)
        if server.n_predict and not any(name in found for name in LIMITS) and "responses" not in path:
            found["max_tokens"] = server.n_predict
    if path in COMPLETIONS:
        found.setdefault("ignore_eos", True)
    return found


def _add_chat_defaults(server: Any, request: dict[str, Any]) -> None:
    """Adds that an answer continues a last message of the assistant, and what --verbose adds to answers."""
    messages = request.get("messages")
    last = messages[-1] if messages and isinstance(messages, list) else None
    if isinstance(last, dict) and last.get("role") == "assistant" and "add_generation_prompt" not in request:
        request.setdefault("continue_final_message", True)
    if server.debug:
        request.setdefault("verbose", True)


def _replace() -> None:
    make_request, make_stream_request = utils.ServerProcess.make_request, utils.ServerProcess.make_stream_request

    def request(server: Any, method: str, path: str, data: Any = None, *given: Any, **options: Any) -> Any:
        answer = make_request(server, method, path, with_defaults(server, path, data), *given, **options)
        answer.headers = CaseInsensitiveDict(answer.headers)  # llama-server's names have capitals
        return answer

    def stream(server: Any, method: str, path: str, data: Any = None, *given: Any, **options: Any) -> Iterator[Any]:
        return make_stream_request(server, method, path, with_defaults(server, path, data), *given, **options)

    utils.ServerProcess.start, utils.ServerProcess.stop = start, stop
    utils.ServerProcess.make_request, utils.ServerProcess.make_stream_request = request, stream
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    utils.match_regex = lambda regex, text: isinstance(text, str)


_replace()
