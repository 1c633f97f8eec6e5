"""OpenAI's Responses, without a memory: what was said before comes with each request."""
