"""Conversion between text and token ids: tokenizer, prompts, chat templates, output parsers, stop strings."""
