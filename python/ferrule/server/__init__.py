"""The HTTP server: OpenAI's API and others over one or more models, and a chat page; `pip install ferrule[server]`.

    ferrule serve org/repo --port 8000

or within a program of one's own, where any ASGI server serves it:

    app = create_app({"my-model": AsyncLLM("path/to/model")})
    other_app.mount("/llm", create_app(...))

A request passes the guards (`guards/`), each a layer that knows nothing of the others: request ids and logs, hosts and
origins, keys, admission, bodies, disconnects. Routes (`openai/`, `responses/`, `anthropic/`, `ollama/`) turn what is
asked into a `Generation` (`generation.py`), and what comes back into their protocol's shapes.
"""

from ferrule.server.app import create_app
from ferrule.server.models import Models
from ferrule.server.serving import serve
from ferrule.server.settings import ServerSettings

__all__ = ["Models", "ServerSettings", "create_app", "serve"]
