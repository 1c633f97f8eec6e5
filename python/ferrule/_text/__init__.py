"""Text on its way to token ids and back: tokenizer, prompts, chat templates, output parsers, stop strings."""
