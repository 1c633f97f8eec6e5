"""Generates a choice, JSON of a schema, and a sentence of a grammar."""

import json

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

llm = LLM(model="org/model", trust_remote_code=True)


def ask(structure):
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=structure)
    return llm.generate("Answer: ", params)[0].outputs[0].text


print(ask(StructuredOutputsParams(choice=["positive", "negative"])) in ("positive", "negative"))
schema = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
print(type(json.loads(ask(StructuredOutputsParams(json=schema, disable_any_whitespace=True)))["ok"]).__name__)
print(
    ask(StructuredOutputsParams(grammar='root ::= "select " column\ncolumn ::= "a" | "b"')) in ("select a", "select b")
)
