# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "llm==0.36",
# ]
#
# [tool.uv]
# exclude-newer = "2026-11-23T00:00:00Z"
# ///
"""LLM, the command line of Simon Willison: a model of `extra-openai-models.yaml` with streams, schemas and tools."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

url, model = sys.argv[1:]
CONFIGURATION = f"""
- model_id: ferrule
  model_name: {model}
  api_base: {url}/v1
  api_key_name: ferrule
  supports_tools: true
  supports_schema: true
"""
WEATHER = '''
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return "21 degrees"
'''
QUESTION = "What is the weather in Paris?"

with TemporaryDirectory() as folder:
    (Path(folder) / "extra-openai-models.yaml").write_text(CONFIGURATION)
    (Path(folder) / "keys.json").write_text(json.dumps({"ferrule": "none"}))

    def llm(*words: str) -> str:
        """Returns what `llm -m ferrule` prints."""
        command = [sys.executable, "-m", "llm", "-m", "ferrule", *words]
        done = subprocess.run(command, env={**os.environ, "LLM_USER_PATH": folder}, stdout=subprocess.PIPE, check=True)
        return done.stdout.decode()

    text = llm(QUESTION)
    assert text.strip()
    assert llm(QUESTION, "--no-stream") == text
    assert json.loads(llm(QUESTION, "--schema", "city str, celsius int")) == {"city": "Paris", "celsius": 21}
    assert llm(QUESTION, "--functions", WEATHER) == text
