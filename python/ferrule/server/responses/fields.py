"""Fields of OpenAI's Responses beside those that the request models declare, and what becomes of each."""

from __future__ import annotations

from ferrule.server.schema.base import ACCEPTED, FieldRules, Unsupported

RESPONSE_FIELDS: FieldRules = {
    "access_programs": Unsupported("the server has no access programs"),
    "background_options": Unsupported("use background"),
    "context_management": ACCEPTED,  # nothing is removed; a conversation that is too long is an error
    "conversation": Unsupported("use previous_response_id, or send the conversation as input"),
    "image": Unsupported("the server generates text only"),
    "logits_processors": Unsupported("functions cannot be sent over HTTP", neutral=([],)),
    "max_tool_calls": ACCEPTED,  # it limits OpenAI's own tools, of which the server has none
    "moderation": Unsupported("the server does not moderate"),
    "prompt": Unsupported("the server stores no prompt templates; use input and instructions"),
    "prompt_cache_options": ACCEPTED,
    "prompt_cache_retention": ACCEPTED,
    "service_tier": ACCEPTED,
    "truncation": Unsupported("a conversation that is too long is an error", neutral=("disabled",)),
}
TEXT_FIELDS: FieldRules = {"verbosity": ACCEPTED}
REASONING_FIELDS: FieldRules = {
    "context": ACCEPTED,
    "generate_summary": ACCEPTED,  # reasoning is returned whole
    "mode": ACCEPTED,
    "summary": ACCEPTED,
}
ITEM_FIELDS: FieldRules = {"phase": ACCEPTED}
CUSTOM_TOOL_FIELDS: FieldRules = {
    "allowed_callers": Unsupported("the model calls all tools", neutral=(["direct"],)),
    "async": Unsupported("the client runs the tools", neutral=(False,)),
    "defer_loading": Unsupported("all tools are part of the prompt", neutral=(False,)),
}
IMAGE_PART_FIELDS: FieldRules = {"file_id": Unsupported("send the image as a data URL in image_url")}
TEXT_PART_FIELDS: FieldRules = {"parsed": ACCEPTED}
CALL_FIELDS: FieldRules = {"parsed_arguments": ACCEPTED}
"""Fields that OpenAI's client adds to an answer and sends back."""
STREAM_FIELDS: FieldRules = {
    "continuous_usage_stats": Unsupported("the last event reports the usage", neutral=(False,)),
    "include_obfuscation": ACCEPTED,
    "include_usage": ACCEPTED,
}
