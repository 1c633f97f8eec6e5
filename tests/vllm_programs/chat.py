"""Answers two conversations at once."""

from vllm import LLM, SamplingParams

llm = LLM(model="org/chat-model", max_model_len=512)
params = SamplingParams(temperature=0, max_tokens=40)
conversations = [
    [{"role": "user", "content": "What is the capital of Japan?"}],
    [{"role": "user", "content": "What is a KV cache?"}],
]
for output in llm.chat(conversations, params, use_tqdm=False):
    print(output.outputs[0].text)
