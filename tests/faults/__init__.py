"""Fault tests: each injects one fault in a separate process and checks the resulting error."""
