"""Prints the log-probability and rank of each generated token."""

from vllm import LLM, SamplingParams

llm = LLM("org/model", seed=0)
params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, prompt_logprobs=0, stop=None, logit_bias=None)
output = llm.generate("The capital of France is", params)[0]
completion = output.outputs[0]
for token_id, logprobs in zip(completion.token_ids, completion.logprobs, strict=True):
    chosen = logprobs[token_id]
    print(repr(chosen.decoded_token), chosen.rank, chosen.logprob <= 0, len(logprobs) >= 2)
print(output.prompt_logprobs[0], len(output.prompt_logprobs) == len(output.prompt_token_ids))
