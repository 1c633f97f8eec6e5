"""Tests of the chat page with Debian's Chromium and a running `ferrule serve` with the embedded model."""
