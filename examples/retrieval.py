"""Answers from documents (RAG): embeds them, finds those nearest to a question, and lets the model read these first.

    python examples/retrieval.py [EMBEDDING_MODEL [MODEL]]

Any model that generates embeds too, so that the embedded one does both here. It goes by words more than by meaning, and
finds little that is put otherwise: take an embedding model (`LLM("org/repo")` of BERT's kind, of Qwen3-Embedding, of
EmbeddingGemma) for anything but trying it out. Vectors have length 1, so a product of matrices is all cosines at once;
a few hundred thousand documents need no database.
"""

import sys

import numpy as np
import numpy.typing as npt

from ferrule import LLM, SamplingParams

DOCUMENTS = (
    "Quantization stores weights in fewer bits, so that less memory is read for each token.",
    "The capital of Japan is Tokyo.",
    "Speculative decoding verifies several guessed tokens at once.",
    "The capital of France is Paris.",
)


def embed(llm: LLM, texts: list[str]) -> npt.NDArray[np.float32]:
    """Float32 `[texts, dimensions]`, rows of length 1."""
    # An embedding model's files say how it pools: leave `pooling` out for one.
    pooling = "mean" if llm.info()["model"] == "tiny" else None
    return np.stack([output.embedding for output in llm.embed(texts, pooling=pooling)])


def nearest(query: npt.NDArray[np.float32], index: npt.NDArray[np.float32], count: int) -> list[tuple[int, float]]:
    """The documents most like a query, with their cosines, the nearest first."""
    cosines = index @ query
    return [(int(place), float(cosines[place])) for place in np.argsort(-cosines)[:count]]


def main(embedding_model: str | None = None, model: str | None = None) -> None:
    """Finds and answers."""
    question = "What is the capital of France?"
    with LLM(embedding_model) as llm:
        index = embed(llm, list(DOCUMENTS))
        found = nearest(embed(llm, [question])[0], index, count=2)
    for place, cosine in found:
        print(f"{cosine:.2f}  {DOCUMENTS[place]}")

    context = "\n".join(DOCUMENTS[place] for place, _ in found)
    with LLM(model) as llm:
        messages = [{"role": "user", "content": f"{context}\n\n{question}"}]
        print(llm.chat(messages, SamplingParams(temperature=0, max_tokens=60))[0].outputs[0].text)


if __name__ == "__main__":
    main(*sys.argv[1:3])
