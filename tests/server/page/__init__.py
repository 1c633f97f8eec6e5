"""The chat page in Debian's Chromium, on a live `ferrule serve` with the embedded model."""
