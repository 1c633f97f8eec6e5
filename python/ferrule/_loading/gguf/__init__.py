"""GGUF files: configuration, tokenizer and tensor names of llama.cpp's format.

The metadata is translated to the fields of config.json, which the architectures read. The spec reverts the changes that
llama.cpp's converters make (row order of queries and keys, norm weights, names).
"""

from ferrule._loading.gguf.config import gguf_config, gguf_spec
from ferrule._loading.gguf.file import GgufFile, is_gguf
from ferrule._loading.gguf.form import GgufForm
from ferrule._loading.gguf.sentence import gguf_pooling
from ferrule._loading.gguf.special import end_tokens
from ferrule._loading.gguf.tokenizer import GgufTokenizer, read_gguf_tokenizer

__all__ = [
    "GgufFile",
    "GgufForm",
    "GgufTokenizer",
    "end_tokens",
    "gguf_config",
    "gguf_pooling",
    "gguf_spec",
    "is_gguf",
    "read_gguf_tokenizer",
]
