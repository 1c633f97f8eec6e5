"""OpenAI's API, with the extras that vLLM's server takes."""
