"""Prints the size of an embedding, and whether it has length 1."""

from vllm import LLM

llm = LLM(model="org/embedding-model", runner="pooling", enforce_eager=True)
for output in llm.embed(["w10 w11", "w12"]):
    embedding = output.outputs.embedding
    print(len(embedding), round(sum(x * x for x in embedding), 3), output.finished)
