"""Searches the most likely continuations."""

from vllm import LLM
from vllm.sampling_params import BeamSearchParams

llm = LLM(model="org/model")
params = BeamSearchParams(beam_width=3, max_tokens=6)
output = llm.beam_search([{"prompt": "The capital of France is"}], params)[0]
scores = [sequence.cum_logprob for sequence in output.sequences]
print(len(scores), scores[0] <= 0, len(output.sequences[0].tokens) > 5, "Paris" in output.sequences[0].text)
