"""OpenAI's Batch API: uploaded files of requests (`/v1/files`) and their execution (`/v1/batches`).

All state is in one directory (`files_dir`), which one server uses at a time. `records` and `files` keep it, `jobs` runs
batches with the engine of `ferrule run-batch`, and `stages` reads and writes their files. A batch that a shutdown
interrupts continues at the next start.
"""

UPLOAD_PATHS = frozenset({"/v1/files", "/files"})
"""Paths whose request bodies are files, which have their own limit of size and time."""
