"""Shares a long prefix between prompts."""

from vllm import LLM, SamplingParams

prefix = "Once upon a time, there was a little cat that lived in a small house near the sea. " * 4
prompts = [prefix + question for question in ("The cat", "The sea")]
params = SamplingParams(temperature=0.0, max_tokens=8)

plain = LLM(model="org/model", gpu_memory_utilization=0.4)
expected = [output.outputs[0].text for output in plain.generate(prompts, params)]
cached = LLM(model="org/model", enable_prefix_caching=True, gpu_memory_utilization=0.4)
cached.generate(prompts[0], params)
outputs = cached.generate(prompts, params)
print([output.outputs[0].text for output in outputs] == expected, outputs[1].num_cached_tokens >= 16)
