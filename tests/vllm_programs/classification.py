"""Classifies texts."""

from vllm import LLM

llm = LLM(model="org/classifier", runner="pooling")
for output in llm.classify(["w10 w11", "w12"]):
    probs = output.outputs.probs
    print(len(probs), output.outputs.num_classes, all(0 <= p <= 1 for p in probs))
