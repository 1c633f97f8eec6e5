"""OpenAI's Responses API, without storage: each request carries the whole conversation."""
