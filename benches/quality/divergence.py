"""Distance of a quantized model from its bf16 original, as llama.cpp's `--kl-divergence` measures it.

Held-out text is cut into windows of 256 tokens without bos; the second half of each window is scored, so that every
scored position has at least 128 tokens of context.
"""

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tiny_llama import Floats
from tokenizers import Tokenizer

WINDOW = 256
FIRST = WINDOW // 2
Model = Callable[[NDArray[np.int64]], Floats]
"""The logits of a window's scored part, [windows, WINDOW - FIRST, vocab], for windows [windows, WINDOW]."""

BATCH = 8
"""Windows in one forward pass: small enough that a layer's activations stay near the cache."""

HELD_OUT = [
    "tkinter/__init__.py",
    "pydoc.py",
    "tkinter/tix.py",
    "xml/dom/minidom.py",
    "fractions.py",
    "re/_compiler.py",
    "site.py",
    "zipimport.py",
    "fileinput.py",
    "textwrap.py",
    "timeit.py",
    "distutils/cmd.py",
    "multiprocessing/reduction.py",
    "idlelib/help.py",
    "idlelib/replace.py",
    "reprlib.py",
    "linecache.py",
]
"""Files of the standard library that training left out (tools/train_tiny)."""


LEFT_OUT = ("/test", "site-packages", "encodings/", "pydoc_data")
"""Path fragments of excluded files, which contain no prose written by programmers."""


def held_out_windows(tokenizer: Path, count: int) -> NDArray[np.int64]:
    """`count` windows spread evenly over the held-out files of this interpreter, [count, WINDOW]."""
    root = Path(sysconfig.get_path("stdlib"))
    texts = [(root / name).read_bytes() for name in HELD_OUT if (root / name).exists()]
    text = b"".join(text for text in texts if text.isascii()).decode()
    ids = np.array(Tokenizer.from_file(str(tokenizer)).encode(text, add_special_tokens=False).ids, np.int64)
    windows = ids[: len(ids) // WINDOW * WINDOW].reshape(-1, WINDOW)
    return windows[np.linspace(0, len(windows) - 1, min(count, len(windows))).round().astype(int)]


def calibration_text() -> str:
    """All other files of the standard library that training may have seen (tools/train_tiny), sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    seen = [name for name in names if name not in HELD_OUT and not any(part in f"/{name}" for part in LEFT_OUT)]
    texts = [(root / name).read_bytes() for name in seen]
    return b"".join(text for text in texts if text.isascii()).decode()


def log_probabilities(model: Model, ids: NDArray[np.int64]) -> Floats:
    """Log-probabilities of every scored position of windows `ids`, [windows * (WINDOW - FIRST - 1), vocab]."""
    out = model(ids)
    scored = np.ascontiguousarray(out[:, :-1]).reshape(-1, out.shape[-1])
    scored -= scored.max(axis=-1, keepdims=True)
    scored -= np.log(np.exp(scored).sum(axis=-1, keepdims=True))
    return scored


@dataclass(frozen=True)
class Distance:
    """Loss of a format; `per_token` keeps the divergences for paired comparisons of two formats."""

    kld: float
    kld_error: float
    perplexity: float
    same_top: float
    per_token: Floats

    def row(self) -> dict[str, float]:
        """Return the figures of this distance that a record stores."""
        return {
            "kld": round(self.kld, 6),
            "kld_error": round(self.kld_error, 6),
            "perplexity": round(self.perplexity, 3),
            "same_top": round(self.same_top, 4),
        }


class Reference:
    """Log-probabilities of the original model, in memory (4 bytes x vocab x scored tokens: 0.5 GB for 256 windows)."""

    def __init__(self, model: Model, ids: NDArray[np.int64]) -> None:
        self.batches = [ids[start : start + BATCH] for start in range(0, len(ids), BATCH)]
        self.kept = [log_probabilities(model, batch) for batch in self.batches]

    def perplexity(self) -> float:
        """Perplexity of the reference."""
        losses = [kept[np.arange(len(kept)), _targets(b)] for kept, b in zip(self.kept, self.batches, strict=True)]
        return float(np.exp(-np.concatenate(losses).astype(np.float64).mean()))

    def distance(self, model: Model) -> Distance:
        """Run `model` over the same windows."""
        klds: list[Floats] = []
        losses: list[Floats] = []
        same: list[NDArray[np.bool_]] = []
        for batch, kept in zip(self.batches, self.kept, strict=True):
            got = log_probabilities(model, batch)
            losses.append(got[np.arange(len(got)), _targets(batch)])
            same.append(got.argmax(axis=-1) == kept.argmax(axis=-1))
            np.subtract(kept, got, out=got)
            klds.append(np.einsum("tv,tv->t", np.exp(kept), got))
        per_token = np.concatenate(klds)
        return Distance(
            kld=float(per_token.mean(dtype=np.float64)),
            kld_error=float(per_token.std(dtype=np.float64) / np.sqrt(len(per_token))),
            perplexity=float(np.exp(-np.concatenate(losses).astype(np.float64).mean())),
            same_top=float(np.concatenate(same).mean()),
            per_token=per_token,
        )


def _targets(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The token that follows each scored position."""
    return ids[:, FIRST + 1 :].reshape(-1)
