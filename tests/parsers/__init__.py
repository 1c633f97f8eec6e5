"""Tests of output parsers: one file for each family of models, and properties of all parsers."""
