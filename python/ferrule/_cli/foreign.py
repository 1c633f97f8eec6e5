"""Commands and options of Ollama, llama.cpp and `llm`, with their replacement here, for error messages."""

from __future__ import annotations

from collections.abc import Sequence

COMMANDS = {
    "help": "ferrule --help, or ferrule COMMAND --help",
    # Ollama
    "show": "ferrule info MODEL",
    "ps": "ferrule list, or GET /api/ps of a server",
    "ls": "ferrule list",
    "create": "ferrule quantize MODEL -o DIR, or a name in ~/.config/ferrule/models.toml (docs/models.md)",
    "cp": "another name in ~/.config/ferrule/models.toml (docs/models.md)",
    "stop": "Ctrl-C in the terminal of `ferrule serve`",
    "start": "ferrule serve MODEL",
    "push": "the command `hf upload` of huggingface_hub",
    "delete": "ferrule rm MODEL",
    "launch": "ferrule serve MODEL, and the address of the server in the program (docs/clients.md)",
    "signin": "the environment variable HF_TOKEN for the hub; local models need no account",
    "download": "ferrule pull MODEL",
    # llm
    "install": "ferrule pull MODEL",
    "models": "ferrule list, or ferrule search",
    "prompt": "ferrule run MODEL PROMPT",
    "embed": "ferrule serve MODEL, and POST /v1/embeddings",
    "templates": "ferrule run --system TEXT MODEL PROMPT",
    "keys": "the environment variable HF_TOKEN for the hub; local models need no key",
    "logs": "/save in ferrule chat",
    "plugins": "ferrule search; there are no plugins",
    "openai": "ferrule chat --url URL MODEL",
    "aliases": "a name in ~/.config/ferrule/models.toml (docs/models.md)",
    # llama.cpp
    "cli": "ferrule run MODEL",
    "llama-cli": "ferrule run MODEL",
    "llama-run": "ferrule run MODEL",
    "llama-simple": "ferrule run --raw MODEL PROMPT",
    "server": "ferrule serve MODEL",
    "llama-server": "ferrule serve MODEL",
    "llama-bench": "ferrule bench MODEL",
    "perplexity": "ferrule eval MODEL TEXT_FILE",
    "llama-perplexity": "ferrule eval MODEL TEXT_FILE",
    "llama-quantize": "ferrule quantize MODEL -o DIR",
}
"""Replacements of other programs' commands."""
OPTIONS = {
    "-m": "MODEL is an argument, as in `ferrule {command} MODEL`",
    "--model": "MODEL is an argument, as in `ferrule {command} MODEL`",
    "-hf": "the repository is the argument MODEL, as in `ferrule {command} org/repo:Q4_K_M`",
    "--hf-repo": "the repository is the argument MODEL, as in `ferrule {command} org/repo:Q4_K_M`",
    "-p": "the prompt is an argument, as in `ferrule run MODEL PROMPT`",
    "--prompt": "the prompt is an argument, as in `ferrule run MODEL PROMPT`",
    "-f": "the prompt may be piped in, as in `ferrule run MODEL < FILE`",
    "--file": "the prompt may be piped in, as in `ferrule run MODEL < FILE`",
    "-a": "the chat page of `ferrule serve` takes text and PDF files; a text may also be piped in",
    "--attachment": "the chat page of `ferrule serve` takes text and PDF files; a text may also be piped in",
    "-s": "use --system for the system prompt, --seed for the seed",
    "-sys": "use --system",
    "-o": "sampling parameters are options, such as --temperature 0.5",
    "-c": "use --max-model-len",
    "--ctx-size": "use --max-model-len",
    "-t": "use --threads",
    "-ngl": "ferrule runs on the CPU; leave it out",
    "--n-gpu-layers": "ferrule runs on the CPU; leave it out",
    "-cnv": "`ferrule run MODEL` starts a conversation",
    "--conversation": "`ferrule run MODEL` starts a conversation",
    "--temp": "use --temperature",
    "--repeat-penalty": "use --repetition-penalty",
    "--n-predict": "use --max-tokens",
    "--grammar-file": "use --grammar with the name of the file",
    "--jinja": "chat templates always apply; leave it out",
    "--verbose": "statistics are shown; --quiet hides them",
    "--keepalive": "a model is loaded as long as its command runs; leave it out",
    "--nowordwrap": "pipe the output to another program; leave it out",
    "--format": "use --json for a JSON report, --json-object or --json-schema for JSON output",
    "--think": "thinking is chosen by the model; leave it out",
    "--hidethinking": "a pipe receives only the answer; leave it out",
}
"""Replacements of other programs' options."""


def option_hint(arguments: Sequence[str], command: str) -> str:
    """Returns the replacement of the first option of another program among the arguments; empty without one."""
    for argument in arguments:
        if argument == "--":
            break
        name = argument.partition("=")[0]
        if name in OPTIONS:
            return f"{name} is an option of another program: {OPTIONS[name].format(command=command)}"
    return ""
