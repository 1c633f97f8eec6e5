"""What requests ask of a model, in no protocol's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ferrule._params.sampling import SamplingParams
from ferrule._params.structured import StructuredOutputsParams
from ferrule._validation import shown
from ferrule.errors import InvalidParameterError
from ferrule.server.context import Context
from ferrule.server.conversation import AUTO, NONE, Conversation, check_reasons, prepare
from ferrule.server.errors import call_fields, unsupported
from ferrule.server.generation import Generation
from ferrule.server.models import Served
from ferrule.server.ollama.protocol import Asking, ChatMessage, ChatRequest, GenerateRequest, Options
from ferrule.server.openai.messages import declared
from ferrule.server.openai.shapes import new_id

NAMES = {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"}
"""Of options that SamplingParams calls otherwise."""
ROOM = ("num_predict", "num_ctx")
"""Options that are read here."""
LATEST = ":latest"
"""What clients put behind names that have no tag."""


def find(server: Context, name: str) -> Served:
    """The model of a name, with or without the tag that every model has.

    Raises ApiError.
    """
    names = {served.name for served in server.models.all()}
    if name not in names and name.removesuffix(LATEST) in names:
        name = name.removesuffix(LATEST)
    return server.models.find(name)


async def chat(server: Context, served: Served, asked: ChatRequest) -> Generation:
    """What is asked by a conversation.

    Raises ApiError, FerruleError.
    """
    return await _converse(
        server, served, asked, [_message(each) for each in asked.messages], declared(asked.tools or ())
    )


async def generate(server: Context, served: Served, asked: GenerateRequest) -> Generation:
    """What is asked by a text: it is what the user says, unless it is raw.

    Raises ApiError, FerruleError.
    """
    if not (asked.raw or asked.suffix):
        messages = [{"role": "user", "content": asked.prompt}]
        if asked.system:
            messages.insert(0, {"role": "system", "content": asked.system})
        return await _converse(server, served, asked, messages, ())
    for field in ("system", "think"):
        if getattr(asked, field):
            beside = "raw" if asked.raw else "suffix"
            raise unsupported(field, f"{field} is given beside {beside}; such a prompt has no chat template")
    prompt: Any = {"prompt": asked.prompt} | ({"suffix": asked.suffix} if asked.suffix else {})
    return Generation(served, prompt, _params(served, asked, _structure(asked)), new_id("ollama"))


def check_reading(served: Served, options: Options | None) -> None:
    """Raises InvalidParameterError, ApiError for options that say nothing of texts which are only read."""
    if options is None:
        return
    _check_room(served, options)
    for name in options.model_dump(exclude_none=True, exclude={"num_ctx"}):
        raise unsupported(f"options.{name}", f"options.{name} is given, but nothing is sampled")


async def _converse(
    server: Context, served: Served, asked: Asking, messages: list[dict[str, Any]], tools: Any
) -> Generation:
    if asked.think:
        check_reasons("think", served, server.settings)
    conversation = Conversation(
        messages=messages,
        tools=tools,
        tool_choice=AUTO if tools else NONE,
        structure=_structure(asked),
        template_arguments=_template_arguments(asked),
    )
    prepared = await prepare(served, server.settings, conversation)
    if asked.logprobs and prepared.message_format is not None:
        raise unsupported("logprobs", "logprobs are asked for, but the output has thinking or calls beside its text")
    params = _params(served, asked, prepared.structure)
    return Generation(served, prepared.prompt, params, new_id("ollama"), prepared.message_format)


def _message(given: ChatMessage) -> dict[str, Any]:
    message: dict[str, Any] = {"role": given.role, "content": given.content}
    if given.thinking is not None:
        message["reasoning_content"] = given.thinking
    if given.tool_name is not None:
        message["name"] = given.tool_name
    if given.tool_call_id is not None:
        message["tool_call_id"] = given.tool_call_id
    if given.tool_calls:
        message["tool_calls"] = [
            {
                **({} if call.id is None else {"id": call.id}),
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in given.tool_calls
        ]
    return message


def _structure(asked: Asking) -> StructuredOutputsParams | None:
    match asked.format:
        case None | "":
            return None
        case "json":
            return StructuredOutputsParams(json_object=True)
        case str():
            raise InvalidParameterError(f"format is {shown(asked.format)}; it must be json or a schema")
        case schema:
            return StructuredOutputsParams(json=schema)


def _template_arguments(asked: Asking) -> Mapping[str, Any]:
    if asked.think is None:
        return {}
    # Qwen's name and DeepSeek's; how long is gpt-oss's.
    arguments: dict[str, Any] = {"enable_thinking": bool(asked.think), "thinking": bool(asked.think)}
    return arguments | ({"reasoning_effort": asked.think} if isinstance(asked.think, str) else {})


def _check_room(served: Served, options: Options) -> None:
    room = served.info["max_model_len"]
    if options.num_ctx is not None and not 1 <= options.num_ctx <= room:
        raise InvalidParameterError(f"options.num_ctx is {shown(options.num_ctx)}; {served.name} has room for {room}")


def _params(served: Served, asked: Asking, structure: StructuredOutputsParams | None) -> SamplingParams:
    options = asked.options or Options()
    _check_room(served, options)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise InvalidParameterError("top_logprobs is given, but logprobs is not true")
    given = options.model_dump(exclude_none=True, exclude=set(ROOM))
    if options.num_predict not in (None, -1, -2):
        given["num_predict"] = options.num_predict
    names = {NAMES.get(name, name): f"options.{name}" for name in Options.model_fields}
    call_fields({**names, "logprobs": "top_logprobs", "structured_outputs.json": "format"})
    return SamplingParams(
        **{NAMES.get(name, name): value for name, value in given.items()},
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        structured_outputs=structure,
    )
