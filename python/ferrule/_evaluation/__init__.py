"""Evaluation of models: perplexity of texts, and divergence from a reference.

`windows` splits texts into windows, `divergence` compares rows of logits in float64, `perplexity` and `compare` run one
model or several over the windows, and `plot` draws the result. The public interface is `LLM.perplexity`, `LLM.compare`,
`LLM.compare_each` and
the command `ferrule eval`.
"""

from ferrule._evaluation.compare import Comparison, Divergence, LikelyToken, WorstToken, compare_each
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
    "compare_each",
    "perplexity",
]
