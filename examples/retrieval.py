"""Retrieval-augmented generation (RAG): embeds documents, finds the nearest ones, and adds them to the prompt.

    python examples/retrieval.py [EMBEDDING_MODEL [MODEL]]

Any generative model can embed too, so the embedded model does both here. Its embeddings match words rather than
meaning: use an embedding model (`LLM("org/repo")` with BERT, Qwen3-Embedding, EmbeddingGemma) for real work. Vectors
have length 1, so one matrix product computes all cosine similarities; no database is needed below a few
hundred thousand documents.
"""

import sys

import numpy as np
import numpy.typing as npt

from ferrule import LLM, SamplingParams

DOCUMENTS = (
    "Quantization stores weights in fewer bits, so that less memory is read for each token.",
    "The capital of Japan is Tokyo.",
    "Speculative decoding verifies several draft tokens at once.",
    "The capital of France is Paris.",
)


def embed(llm: LLM, texts: list[str]) -> npt.NDArray[np.float32]:
    """Returns embeddings, float32 `[texts, dimensions]`, with rows of length 1."""
    # The files of an embedding model set its pooling: omit `pooling` for one.
    pooling = "mean" if llm.info()["model"] == "tiny" else None
    return np.stack([output.outputs.embedding for output in llm.embed(texts, pooling=pooling)])


def nearest(query: npt.NDArray[np.float32], index: npt.NDArray[np.float32], count: int) -> list[tuple[int, float]]:
    """Returns index and cosine similarity of the `count` documents nearest to a query, the nearest first."""
    cosines = index @ query
    return [(int(place), float(cosines[place])) for place in np.argsort(-cosines)[:count]]


def main(embedding_model: str | None = None, model: str | None = None) -> None:
    """Retrieves two documents and answers a question with them."""
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
