"""Evaluation of models: perplexity of texts, and divergence from a reference.

`windows` cuts texts into what a model reads at once, `divergence` compares rows of logits in float64, `perplexity` and
`compare` run one model or two over the windows, and `plot` draws what came out. `LLM.perplexity` and `LLM.compare` are
the ways in; `ferrule eval` is the command line.
"""

from ferrule._evaluation.compare import Comparison, Divergence, LikelyToken, WorstToken, compare
from ferrule._evaluation.perplexity import Perplexity, perplexity
from ferrule._evaluation.subject import Subject
from ferrule._evaluation.windows import DEFAULT_WINDOW, TextOrTokens, Window, Windowing

__all__ = [
    "DEFAULT_WINDOW",
    "Comparison",
    "Divergence",
    "LikelyToken",
    "Perplexity",
    "Subject",
    "TextOrTokens",
    "Window",
    "Windowing",
    "WorstToken",
    "compare",
    "perplexity",
]
