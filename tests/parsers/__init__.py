"""Parsers of models' messages: one file a family, and what holds for all of them."""
