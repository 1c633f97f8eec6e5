"""Request and response models of OpenAI's API, with vLLM's extensions; one module for each family of routes."""
