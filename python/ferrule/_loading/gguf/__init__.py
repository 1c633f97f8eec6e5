"""Models in one file, as llama.cpp has them: what a GGUF's metadata says, in the words of the rest of ferrule.

The metadata becomes the fields of a config.json, which the architectures read as they read any other; what the
converters change on the way (rows of queries and keys, weights of norms, names) is undone in the spec.
"""

from ferrule._loading.gguf.config import gguf_spec
from ferrule._loading.gguf.file import GgufFile, is_gguf
from ferrule._loading.gguf.sentence import gguf_pooling
from ferrule._loading.gguf.special import end_tokens
from ferrule._loading.gguf.tokenizer import GgufTokenizer, read_gguf_tokenizer

__all__ = [
    "GgufFile",
    "GgufTokenizer",
    "end_tokens",
    "gguf_pooling",
    "gguf_spec",
    "is_gguf",
    "read_gguf_tokenizer",
]
