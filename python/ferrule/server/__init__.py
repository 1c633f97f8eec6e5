"""HTTP server for one or more models with the APIs of OpenAI, Anthropic and Ollama and a chat page.

It needs `pip install ferrule[server]`.

    ferrule serve org/repo --port 8000

or in a program, served by any ASGI server:

    app = create_app({"my-model": AsyncLLM("path/to/model")})
    other_app.mount("/llm", create_app(...))

A request passes the middleware (`middleware/`): request ids and logs, hosts and origins, API keys, admission, limits of
bodies, disconnects. The protocol packages (`openai/`, `responses/`, `anthropic/`, `ollama/`), which do not import each
other, convert requests to a `Generation` (`generation.py`) and its output to their responses.
"""

from ferrule.server.app import create_app
from ferrule.server.models import Models
from ferrule.server.residency import OnDemand
from ferrule.server.serving import serve
from ferrule.server.settings import ServerSettings

__all__ = ["Models", "OnDemand", "ServerSettings", "create_app", "serve"]
