"""Log-probabilities of tokens in OpenAI's form, which Ollama and the Responses API use too."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import BaseModel

from ferrule.outputs import TokenLogprobs
from ferrule.server.models import ServedModel


class TopLogprob(BaseModel):
    """An alternative token with its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A generated token with its log-probability and the most likely alternatives."""

    top_logprobs: list[TopLogprob]


def token_logprob(
    served: ServedModel,
    logprobs: TokenLogprobs,
    top_logprobs: int,
    token_name: Callable[[int, str], str] = lambda _, text: text,
) -> TokenLogprob:
    """Converts the log-probabilities at one position, with at most `top_logprobs` alternatives.

    `token_name` returns the name of a token from its id and its text.
    """
    # The sampled token is the first entry; it is among the alternatives only where its rank puts it there.
    (sampled, found) = next(iter(logprobs.items()))
    ranked = sorted(logprobs.items(), key=lambda item: item[1].rank)[:top_logprobs]
    return TokenLogprob(
        token=token_name(sampled, found.decoded_token),
        logprob=found.logprob,
        bytes=served.token_bytes(sampled),
        top_logprobs=[
            TopLogprob(
                token=token_name(token, each.decoded_token), logprob=each.logprob, bytes=served.token_bytes(token)
            )
            for token, each in ranked
        ],
    )
