"""Fields of OpenAI's API beside those that the request models declare, and what becomes of each."""

from __future__ import annotations

from ferrule.server.schema import llama_cpp
from ferrule.server.schema.base import ACCEPTED, FieldRules, Unsupported

SERVICE_FIELDS: FieldRules = {
    **llama_cpp.OTHER_FIELDS,
    **llama_cpp.NATIVE_FIELDS,
    "metadata": ACCEPTED,
    "prompt_cache_key": ACCEPTED,
    "prompt_cache_options": ACCEPTED,
    "prompt_cache_retention": ACCEPTED,
    "safety_identifier": ACCEPTED,
    "service_tier": ACCEPTED,
    "store": ACCEPTED,
    "user": ACCEPTED,
    "verbosity": ACCEPTED,
    "logits_processors": Unsupported("functions cannot be sent over HTTP", neutral=([],)),
}
"""Fields of both APIs for text: billing, storage and caching of OpenAI's service, and llama.cpp's."""
CHAT_FIELDS: FieldRules = {
    **SERVICE_FIELDS,
    "audio": Unsupported("the server generates text only"),
    "function_call": Unsupported("use tool_choice", neutral=("none", "auto")),
    "functions": Unsupported("use tools", neutral=([],)),
    "modalities": Unsupported("the server generates text only", neutral=(["text"],)),
    "moderation": Unsupported("the server does not moderate"),
    "parse_tool_calls": Unsupported("start the server with --tool-call-parser", neutral=(True,)),
    "web_search_options": Unsupported("the server does not search the web"),
}
MESSAGE_FIELDS: FieldRules = {
    "annotations": Unsupported("the server reads no citations", neutral=([],)),
    "audio": Unsupported("the server reads text only"),
    "function_call": Unsupported("use tool_calls"),
    "parsed": ACCEPTED,  # added by OpenAI's client to the content
    "provider_specific_fields": ACCEPTED,  # added by LiteLLM
    "refusal": Unsupported("chat templates have no refusals"),
}
"""Fields of messages that come back from an answer."""
CALL_FIELDS: FieldRules = {"parsed_arguments": ACCEPTED}
"""Fields of calls that OpenAI's client adds to the arguments."""
EMBEDDING_FIELDS: FieldRules = {"user": ACCEPTED}
POOLING_FIELDS: FieldRules = {
    "activation": Unsupported("the values are probabilities", neutral=(True,)),
    "add_special_tokens": Unsupported("special tokens are those of the model", neutral=(True,)),
    "cache_salt": ACCEPTED,  # texts are encoded without the prefix cache
    "embed_dtype": Unsupported("numbers are float32", neutral=("float32",)),
    "endianness": Unsupported("bytes are little-endian", neutral=("native", "little")),
    "messages": Unsupported("send texts in input"),
    "mm_processor_kwargs": Unsupported("the server reads text only", neutral=({},)),
    "priority": Unsupported("texts are encoded in the order of arrival", neutral=(0,)),
    "request_id": ACCEPTED,
    "softmax": Unsupported("the values are probabilities", neutral=(True,)),
    "use_activation": Unsupported("the values are probabilities", neutral=(True,)),
    "user": ACCEPTED,
}
"""Fields of vLLM's routes for pooling models."""
RERANK_FIELDS: FieldRules = {
    "raw_scores": Unsupported("scores are relevances from 0 to 1", neutral=(False,)),
    "truncation_direction": Unsupported("texts are truncated at their end", neutral=("Right", "right")),
}
"""Fields of text-embeddings-inference."""
STREAM_FIELDS: FieldRules = {"include_obfuscation": ACCEPTED}
