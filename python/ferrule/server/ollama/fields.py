"""Fields of Ollama's API beside those that the request models declare, and what becomes of each."""

from __future__ import annotations

from ferrule.server.schema.base import ACCEPTED, FieldRules, Unsupported

OPTIONS: FieldRules = {
    "embedding_only": ACCEPTED,
    "f16_kv": ACCEPTED,
    "logits_all": ACCEPTED,
    "low_vram": ACCEPTED,
    "main_gpu": ACCEPTED,
    "num_batch": ACCEPTED,
    "num_ctx": ACCEPTED,  # the context is the model's; Ollama lowers longer ones to it
    "num_gpu": ACCEPTED,
    "num_keep": ACCEPTED,  # the context is never shifted
    "num_thread": ACCEPTED,
    "numa": ACCEPTED,
    "penalize_newline": Unsupported("penalties apply to all tokens", neutral=(True,)),
    "repeat_last_n": Unsupported("repeat_penalty covers the whole context", neutral=(-1,)),
    "tfs_z": Unsupported("use top_p, min_p or typical_p", neutral=(1,)),
    "use_mlock": ACCEPTED,
    "use_mmap": ACCEPTED,
    "vocab_only": ACCEPTED,
}
"""Options that say how a model is loaded have no effect: the model is loaded already."""
CHAT_FIELDS: FieldRules = {
    "shift": Unsupported("a conversation that is too long is an error", neutral=(False,)),
    "truncate": Unsupported("a conversation that is too long is an error", neutral=(False,)),
}
GENERATE_FIELDS: FieldRules = {
    **CHAT_FIELDS,
    "context": Unsupported("use /api/chat and send all messages", neutral=([],)),
    "height": Unsupported("the server generates text only"),
    "steps": Unsupported("the server generates text only"),
    "template": Unsupported("the model's chat template applies", neutral=("",)),
    "width": Unsupported("the server generates text only"),
}
