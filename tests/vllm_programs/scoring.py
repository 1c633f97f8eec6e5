"""Scores documents for a query."""

from vllm import LLM

llm = LLM(model="org/reranker", runner="pooling")
for output in llm.score("w10", ["w11", "w12 w13"]):
    print(0 < output.outputs.score < 1)
