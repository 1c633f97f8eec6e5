"""Generates with and without an adapter."""

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

llm = LLM(model="org/model", enable_lora=True, max_loras=2, max_lora_rank=16)
params = SamplingParams(temperature=0, max_tokens=4)
adapter = LoRARequest("sql", 1, "org/adapter")
prompt = {"prompt_token_ids": [5, 6, 7]}
base, adapted = llm.generate([prompt, prompt], params, lora_request=[None, adapter])
print(base.lora_request, adapted.lora_request.lora_name, len(adapted.outputs[0].token_ids))
