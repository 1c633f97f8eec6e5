"""Conversion of requests of Ollama's API to generations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ferrule._params.sampling import SamplingParams
from ferrule._params.structured import StructuredOutputsParams
from ferrule._text.chat import ImageSource, data_url
from ferrule.errors import InvalidParameterError
from ferrule.server.context import Context
from ferrule.server.conversation import AUTO, NONE, Conversation, check_reasoning_supported, prepare_prompt
from ferrule.server.errors import unsupported
from ferrule.server.generation import Generation, new_request_id
from ferrule.server.models import ModelName, ServedModel
from ferrule.server.ollama.protocol import ChatMessage, ChatRequest, GenerateRequest, GenerationRequest, Options
from ferrule.server.request_record import name_fields
from ferrule.server.schema.duration import seconds
from ferrule.server.schema.tools import tool_dicts

NAMES = {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"}
"""Names of SamplingParams for options with another name."""
LATEST = ":latest"
"""Tag that clients append to names without one."""


def find(server: Context, name: str) -> ModelName:
    """Returns the model of a name, with or without the tag `:latest`.

    Raises ApiError.
    """
    names = {each.name for each in server.models.all()}
    if name not in names and name.removesuffix(LATEST) in names:
        name = name.removesuffix(LATEST)
    return server.models.find(name)


async def lease(server: Context, name: str, keep_alive: float | str | None = None) -> ServedModel:
    """Returns the model of a name, which stays loaded until the current request has ended.

    `keep_alive` is the time for which it stays loaded afterwards.

    Raises ApiError, EngineError.
    """
    return await server.lease(find(server, name).name, None if keep_alive is None else seconds(keep_alive))


async def chat(server: Context, served: ServedModel, request: ChatRequest) -> Generation:
    """Converts a request with a conversation to a generation.

    Raises ApiError, FerruleError.
    """
    return await _converse(server, served, request, _messages(request), tool_dicts(request.tools or ()))


async def generate(server: Context, served: ServedModel, request: GenerateRequest) -> Generation:
    """Converts a request with a prompt to a generation.

    The prompt is a user message unless it is raw, has a suffix, or the model has no chat template.

    Raises ApiError, FerruleError.
    """
    if request.raw or request.suffix:
        beside = "raw, which skips" if request.raw else "suffix, which skips"
    elif server.settings.chat_template is None and not served.llm.chat_templates:
        beside = "a model without"
    else:
        messages = [{"role": "user", "content": _content(request.prompt, request.images, "images")}]
        if request.system:
            messages.insert(0, {"role": "system", "content": request.system})
        return await _converse(server, served, request, messages, ())
    for field in ("system", "think", "images"):
        if getattr(request, field):
            raise unsupported(field, f"{field} is not supported with {beside} the chat template")
    prompt: Any = {"prompt": request.prompt} | ({"suffix": request.suffix} if request.suffix else {})
    return Generation(served, prompt, _params(request, _structure(request)), new_request_id("ollama"))


def check_embed_options(options: Options | None) -> None:
    """Raises ApiError for sampling options of a request for embeddings."""
    if options is None:
        return
    for name in options.model_dump(exclude_none=True):
        raise unsupported(f"options.{name}", f"options.{name} is not supported for embeddings")


async def _converse(
    server: Context, served: ServedModel, request: GenerationRequest, messages: list[dict[str, Any]], tools: Any
) -> Generation:
    if request.think:
        check_reasoning_supported("think", served, server.settings)
    conversation = Conversation(
        messages=messages,
        tools=tools,
        tool_choice=AUTO if tools else NONE,
        structure=_structure(request),
        template_arguments=_template_arguments(request),
    )
    prepared = await prepare_prompt(served, server.settings, conversation)
    if request.logprobs and prepared.message_format is not None:
        raise unsupported("logprobs", "logprobs is not supported for outputs with thinking or tool calls")
    params = _params(request, prepared.structure)
    return Generation(served, prepared.prompt, params, new_request_id("ollama"), prepared.message_format)


def _messages(request: ChatRequest) -> list[dict[str, Any]]:
    return [_message(message, f"messages[{index}]") for index, message in enumerate(request.messages)]


def _content(text: str, images: Sequence[str] | None, where: str) -> str | list[Any]:
    """Returns the content of a message, in which images precede the text."""
    if not images:
        return text
    sources = [ImageSource(data_url(image), f"{where}[{index}]") for index, image in enumerate(images)]
    return [*sources, {"type": "text", "text": text}]


def _message(given: ChatMessage, where: str) -> dict[str, Any]:
    content = _content(given.content, given.images, f"{where}.images")
    message: dict[str, Any] = {"role": given.role, "content": content}
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


def _structure(request: GenerationRequest) -> StructuredOutputsParams | None:
    match request.format:
        case None | "":
            return None
        case "json":
            return StructuredOutputsParams(json_object=True)
        case str():
            raise InvalidParameterError("format", request.format, "'json' or a JSON schema")
        case schema:
            return StructuredOutputsParams(json=schema)


def _template_arguments(request: GenerationRequest) -> Mapping[str, Any]:
    if request.think is None:
        return {}
    # The names of Qwen's and DeepSeek's templates; reasoning_effort is gpt-oss's.
    arguments: dict[str, Any] = {"enable_thinking": bool(request.think), "thinking": bool(request.think)}
    return arguments | ({"reasoning_effort": request.think} if isinstance(request.think, str) else {})


def _params(request: GenerationRequest, structure: StructuredOutputsParams | None) -> SamplingParams:
    options = request.options or Options()
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidParameterError("top_logprobs", request.top_logprobs, "left out unless logprobs is true")
    given = options.model_dump(exclude_none=True, exclude={"num_predict"})
    if options.num_predict not in (None, -1, -2):
        given["num_predict"] = options.num_predict
    names = {NAMES.get(name, name): f"options.{name}" for name in Options.model_fields}
    name_fields(
        {
            **names,
            "logprobs": "top_logprobs",
            "structured_outputs.json": "format",
            "structured_outputs.grammar": "tools",
        }
    )
    return SamplingParams.with_model_defaults(
        **{NAMES.get(name, name): value for name, value in given.items()},
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        structured_outputs=structure,
    )
