"""OpenAI's API, with vLLM's extensions."""
