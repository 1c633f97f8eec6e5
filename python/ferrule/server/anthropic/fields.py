"""Fields of Anthropic's Messages beside those that the request models declare, and what becomes of each."""

from __future__ import annotations

from ferrule.server.schema.base import ACCEPTED, FieldRules, Unsupported

MESSAGES_FIELDS: FieldRules = {
    "billing_policy": ACCEPTED,
    "compaction": Unsupported("a conversation that is too long is an error"),
    "container": Unsupported("the server runs no code"),
    "context_management": ACCEPTED,  # nothing is removed; a conversation that is too long is an error
    "diagnostics": ACCEPTED,
    "fallback_credit_token": ACCEPTED,
    "fallbacks": Unsupported("one model answers", neutral=([],)),
    "inference_geo": ACCEPTED,
    "mcp_servers": Unsupported("the server calls no tools; the client does", neutral=([],)),
    "metadata": ACCEPTED,
    "output_format": Unsupported("use output_config.format"),
    "service_tier": ACCEPTED,
    "speed": ACCEPTED,
    "thread": Unsupported("the server stores no conversations; send all messages"),
    "user_profile_id": ACCEPTED,
    "workspace_id": ACCEPTED,
}
TOOL_FIELDS: FieldRules = {
    "allowed_callers": Unsupported("the model calls all tools", neutral=(["direct"],)),
    "defer_loading": Unsupported("all tools are part of the prompt", neutral=(False,)),
    "eager_input_streaming": ACCEPTED,
    "input_examples": Unsupported("describe examples in description", neutral=([],)),
}
OUTPUT_FIELDS: FieldRules = {"task_budget": Unsupported("use max_tokens")}
THINKING_FIELDS: FieldRules = {"display": Unsupported("reasoning is returned unchanged")}
TEXT_FIELDS: FieldRules = {"citations": Unsupported("the server reads no citations", neutral=([],))}
