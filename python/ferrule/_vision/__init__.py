"""Images of prompts: reading them, and preparing them for the vision tower of a model."""
