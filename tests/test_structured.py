"""Structured output with schemas, expressions, grammars and choices, on the real engine and the embedded model."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ferrule import LLM, AsyncLLM, RequestOutput, SamplingParams, StructuredOutputsParams
from ferrule._cli import main
from ferrule._text.prompt import TokensPrompt
from ferrule.errors import InvalidParameterError, TokenizerError
from random_schemas import FORMATS, Schemas

pytestmark = pytest.mark.native

SCHEMAS = 250
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
NESTED = 'start: "(" start ")" | "x"'


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(seed=0) as llm:
        yield llm


def asking(seed: int = 1, max_tokens: int = 300, **structure: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, structured_outputs=StructuredOutputsParams(**structure))


def one(llm: LLM, params: SamplingParams, prompt: str = "The answer is") -> RequestOutput:
    return llm.generate(prompt, params)[0]


def test_outputs_of_random_schemas_validate(llm: LLM) -> None:
    schemas = [Schemas(seed).make() for seed in range(SCHEMAS)]
    params = [
        SamplingParams(
            seed=seed,
            temperature=(0.0, 0.7, 1.0, 1.5)[seed % 4],
            max_tokens=400,
            structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=seed % 3 != 0),
        )
        for seed, schema in enumerate(schemas)
    ]
    outputs = llm.generate([f"As JSON ({number}):" for number in range(SCHEMAS)], params)
    completed = 0
    for schema, output in zip(schemas, outputs, strict=True):
        result = output.outputs[0]
        if result.finish_reason == "length":
            continue
        assert result.finish_reason == "stop"
        completed += 1
        checker = jsonschema.FormatChecker(FORMATS)
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(result.text))
    assert completed > SCHEMAS * 0.8, f"only {completed} of {SCHEMAS} came to an end"


def test_json_regex_choice_and_grammar(llm: LLM) -> None:
    for seed in range(4):
        person = one(llm, asking(seed, json=PERSON)).outputs[0]
        jsonschema.validate(json.loads(person.text), PERSON)
        assert re.fullmatch(r"\d{3}-\d{4}", one(llm, asking(seed, regex=r"^\d{3}-\d{4}$")).outputs[0].text)
        assert one(llm, asking(seed, choice=["Paris", "Par", "Rome, Italy"])).outputs[0].text in {
            "Paris",
            "Par",
            "Rome, Italy",
        }
        assert re.fullmatch(r"\(*x\)*", one(llm, asking(seed, grammar=NESTED)).outputs[0].text)
        anything = one(llm, asking(seed, json_object=True, disable_any_whitespace=True)).outputs[0]
        assert anything.finish_reason == "length" or isinstance(json.loads(anything.text), dict)


def test_structural_tags_in_free_text(llm: LLM) -> None:
    whole = r'<f=a>(?:1|22)</f>|<f=b>"x"</f>'
    structures = [
        {"begin": "<f=a>", "schema": {"enum": [1, 22]}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"const": "x"}, "end": "</f>"},
    ]
    tag = {"structures": structures, "triggers": ["<f="]}
    pieces, _ = llm._tokenizer.token_bytes(llm._model.vocab_size)
    first, *others = (pieces.index(byte) for byte in (b"<", b"f", b"=", b"a", b"b"))
    second, third, *names = others

    def tempt(token_ids: Any, logits: Any) -> None:
        # Without help, the model would hardly write a trigger or different names.
        latest = int(token_ids[-1]) if len(token_ids) else -1
        name = names[len(token_ids) // 10 % 2]
        logits[{first: second, second: third, third: name}.get(latest, first)] += 100

    found: list[str] = []
    for seed in range(3):
        params = replace(asking(seed, structural_tag=tag, max_tokens=60), logits_processors=[tempt])
        text = one(llm, params).outputs[0].text
        places = [match.start() for match in re.finditer("<f=", text)]
        # The last structure may be incomplete.
        for place in places[:-1]:
            match = re.match(whole, text[place:])
            assert match is not None, text
            found.append(match[0])
    assert {match[3] for match in found} == {"a", "b"}, "there are too few structures for the test"


def test_prompt_ending_within_a_character(llm: LLM) -> None:
    pieces, _ = llm._tokenizer.token_bytes(llm._model.vocab_size)
    prompt: TokensPrompt = {"prompt_token_ids": [5, pieces.index(b"\xc3")]}
    assert llm.generate(prompt, asking(json={"enum": [1]}))[0].outputs[0].text == "1"
    deltas = llm.stream(prompt, asking(choice=["Rome"]))
    assert "".join(delta.text for delta in deltas) == "Rome"


def test_aborted_requests_free_pages() -> None:
    draft = {"model": "tiny", "num_speculative_tokens": 4}
    with LLM(seed=0, speculative_config=draft, enable_prefix_caching=False) as llm:
        params = [asking(seed, json=PERSON, disable_any_whitespace=True) for seed in range(4)]
        prompt: TokensPrompt = {"prompt_token_ids": [300 + index % 1000 for index in range(700)]}
        for received in (0, 1, 3):
            # Another request runs at the same time.
            other = llm.stream("The answer is", asking(json=PERSON))
            next_text = next(other).text
            stream = llm.stream_all([prompt] * len(params), params)
            for _ in range(received):
                next(stream)
            stream.close()
            assert llm.metrics().running == 1
            text = next_text + "".join(delta.text for delta in other)
            jsonschema.validate(json.loads(text), PERSON)
            metrics = llm.metrics()
            assert metrics.running == metrics.waiting == 0
            assert metrics.pages_free == metrics.pages_total
        assert metrics.drafted_tokens > 0


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({"grammar": 'root ::= "a" | missing'}, "line 1: rule .missing. is not defined"),
        ({"grammar": 'start: %json {"multipleOf": 10000019}'}, "10000019"),
        ({"json": {"properties": {f"p{index}": {} for index in range(600)}}}, "600 optional properties"),
        ({"json": {"type": "integer", "minimum": 1e19}}, "9223372036854774784"),
        ({"regex": "a?" * 30_000}, "30000 parts"),
    ],
)
def test_rejected_structures_name_the_limit(llm: LLM, structure: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        one(llm, asking(**structure))


def test_64_bit_integer_bounds(llm: LLM) -> None:
    schema = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    for seed in range(4):
        text = one(llm, asking(seed, json=schema)).outputs[0].text
        jsonschema.validate(json.loads(text), schema)


def test_output_ends_when_grammar_is_complete(llm: LLM) -> None:
    output = one(llm, asking(choice=["yes", "no"], max_tokens=50)).outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert llm.detokenize(output.token_ids) == output.text
    # `min_tokens` is larger than the complete output.
    longer = SamplingParams(
        seed=1, min_tokens=40, max_tokens=50, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])
    )
    assert one(llm, longer).outputs[0].text in {"yes", "no"}
    # If more text may follow, the model or the length ends the output.
    assert one(llm, asking(regex="a+", max_tokens=3)).outputs[0].finish_reason in {"stop", "length"}
    ignoring = SamplingParams(
        seed=1, max_tokens=9, ignore_eos=True, structured_outputs=StructuredOutputsParams(regex="a+")
    )
    output = one(llm, ignoring).outputs[0]
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 9
    assert set(output.text) == {"a"}


def test_max_tokens_truncates_structured_output(llm: LLM) -> None:
    output = one(llm, asking(json=PERSON, max_tokens=4)).outputs[0]
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 4
    assert '{"name"'.startswith(output.text[:1])


def test_structured_outputs_with_other_sampling_parameters(llm: LLM) -> None:
    structure = StructuredOutputsParams(json=PERSON)
    digits = {token: -100.0 for token in range(7, 300) if llm.token_text(token).strip().isdigit()}
    for seed, more in enumerate(
        [
            {"repetition_penalty": 1.8, "presence_penalty": 1.5, "frequency_penalty": 1.5},
            {"top_k": 3, "top_p": 0.5, "min_p": 0.2},
            {"temperature": 3.0, "logit_bias": digits},
            {"temperature": 0.0, "logprobs": 5, "n": 1},
        ]
    ):
        given: dict[str, Any] = {"seed": seed, "max_tokens": 400, "structured_outputs": structure, **more}
        output = one(llm, SamplingParams(**given)).outputs[0]
        assert output.finish_reason == "stop"
        jsonschema.validate(json.loads(output.text), PERSON)


def test_completions_of_one_request_differ(llm: LLM) -> None:
    several = SamplingParams(n=6, seed=3, max_tokens=300, structured_outputs=StructuredOutputsParams(json=PERSON))
    outputs = one(llm, several).outputs
    for output in outputs:
        jsonschema.validate(json.loads(output.text), PERSON)
        assert one(llm, asking(output.seed, json=PERSON)).outputs[0].token_ids == output.token_ids
    assert len({output.text for output in outputs}) > 1


def test_structured_stream(llm: LLM) -> None:
    params = asking(5, json=PERSON)
    deltas = list(llm.stream("The answer is", params))
    assert "".join(delta.text for delta in deltas) == one(llm, params).outputs[0].text


def test_explain_names_structured_outputs_as_dropping_stage(llm: LLM) -> None:
    step = next(iter(llm.explain("The capital of France is", asking(choice=["{", "}"]), candidates=20)))
    assert {candidate.dropped_by for candidate in step.candidates} >= {"structured_outputs"}
    assert step.text in {"{", "}"}


def test_stop_string_ends_structured_output(llm: LLM) -> None:
    params = SamplingParams(
        seed=1, max_tokens=None, stop='"age', structured_outputs=StructuredOutputsParams(json=PERSON)
    )
    output = one(llm, params).outputs[0]
    assert output.stop_reason == '"age'


def test_forced_tokens_are_speculated(llm: LLM) -> None:
    """The grammar forces all tokens of a long name, and most of these speculative tokens are accepted."""
    name = "the little cat and the little dog"
    schema = {"type": "object", "properties": {name: {"type": "boolean"}}, "required": [name]}
    params = asking(json=schema | {"additionalProperties": False}, disable_any_whitespace=True)
    output = one(llm, params)
    assert list(json.loads(output.outputs[0].text)) == [name]
    assert output.metrics.accepted_tokens > 0


def test_preemption_does_not_change_structured_output() -> None:
    """A preempted request is computed again and continues with the same output."""
    prompts: list[TokensPrompt] = [{"prompt_token_ids": [7 + n] * 40} for n in range(8)]
    params = [asking(seed, json=PERSON, max_tokens=80) for seed in range(8)]
    with LLM(enable_prefix_caching=False) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        page = 16 * llm.info()["kv_bytes_per_token"]
    with LLM(enable_prefix_caching=False, kv_cache_memory=14 * page) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == wanted
        assert llm.metrics().preemptions > 0


def test_structured_outputs_of_async_llm() -> None:
    async def main() -> None:
        async with AsyncLLM() as llm:

            async def answer(seed: int) -> str:
                states = [state async for state in llm.generate("The answer is", asking(seed, json=PERSON))]
                return states[-1].outputs[0].text

            for text in await asyncio.gather(*map(answer, range(6))):
                jsonschema.validate(json.loads(text), PERSON)
            with pytest.raises(InvalidParameterError, match=r"structured_outputs\.regex"):
                async for _ in llm.generate("x", asking(regex="(")):
                    pass

    asyncio.run(main())


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({}, "structured_outputs must be exactly one of json, regex, choice, grammar,"),
        ({"regex": "a", "choice": ["a"]}, "regex, choice"),
        ({"regex": 3}, r"structured_outputs\.regex must be a string, got 3"),
        ({"json": 3}, r"structured_outputs\.json must be JSON text or a mapping, got 3"),
        ({"json": {"a": {1, 2}}}, r"structured_outputs\.json must be valid JSON \(O"),
        ({"json": {"a": float("nan")}}, r"structured_outputs\.json must be valid JSON \(O"),
        ({"choice": "abc"}, r"structured_outputs\.choice must be a list of strings, got 'abc'"),
        ({"choice": ["a", ""]}, r"choice\[1\]"),
        ({"json_object": False}, r"structured_outputs\.json_object must be True or None, got False"),
        (
            {"regex": "a", "disable_any_whitespace": True},
            r"structured_outputs\.disable_any_whitespace is not supported with regex, got True; it",
        ),
        ({"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "}, "whitespace_pattern"),
    ],
)
def test_invalid_structured_outputs_params(structure: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        StructuredOutputsParams(**structure)


def test_mapping_is_rejected_as_structured_outputs() -> None:
    wrong: Any = {"regex": "a"}
    with pytest.raises(InvalidParameterError, match="StructuredOutputsParams"):
        SamplingParams(structured_outputs=wrong)


def test_logits_processors_cannot_restore_masked_tokens(llm: LLM) -> None:
    def favour_all(token_ids: Any, logits: Any) -> None:
        logits[:] = 0

    for seed in range(4):
        params = replace(asking(seed, choice=["blue", "green"]), logits_processors=[favour_all])
        assert one(llm, params).outputs[0].text in ("blue", "green")


def test_schema_of_a_model_class(llm: LLM) -> None:
    class Person:
        @classmethod
        def model_json_schema(cls) -> dict[str, Any]:
            return PERSON

    jsonschema.validate(json.loads(one(llm, asking(json=Person)).outputs[0].text), PERSON)


def test_response_formats() -> None:
    read = StructuredOutputsParams.from_response_format
    assert read({"type": "text"}) is None
    assert read({"type": "json_object"}) == StructuredOutputsParams(json_object=True)
    schema: dict[str, Any] = {
        "type": "json_schema",
        "json_schema": {"name": "person", "strict": True, "schema": PERSON},
    }
    assert read(schema) == StructuredOutputsParams(json=PERSON)
    wrong: Any = None
    schemas = [{"type": "json_schema", "json_schema": schema} for schema in ({}, {"schema": None}, wrong)]
    for value in ({"type": "xml"}, {"type": []}, {"type": "json_schema"}, *schemas, {}, wrong):
        with pytest.raises(InvalidParameterError, match="response_format"):
            read(value)
    for value in ({"type": "text", "mood": 1}, {"type": "json_object", "mood": 1}, {**schema, "mood": 1}):
        with pytest.raises(
            InvalidParameterError, match=r"response_format\.mood is not supported, got 1; the fields are "
        ):
            read(value)
    schema["json_schema"]["mood"] = 1
    with pytest.raises(InvalidParameterError, match=r"response_format\.json_schema\.mood is not supported, got"):
        read(schema)


@pytest.mark.parametrize(
    ("field", "constraint"),
    [
        ("choice[1]", {"choice": ["a", "\ud800"]}),
        ("json", {"json": {"enum": ["\ud800"]}}),
        ("regex", {"regex": "\ud800"}),
        ("grammar", {"grammar": 'start: "\ud800"'}),
        ("structural_tag", {"structural_tag": "\ud800"}),
    ],
)
def test_lone_surrogates_are_rejected(field: str, constraint: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        StructuredOutputsParams(**constraint)
    assert caught.value.field == f"structured_outputs.{field}"
    assert caught.value.requirement == "valid Unicode (found a lone surrogate, U+D800)"


def test_tokenizer_without_byte_pieces(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM() as other:
        monkeypatch.setattr(other._tokenizer, "_pieces", None)
        with pytest.raises(TokenizerError, match="depends on adjacent tokens"):
            one(other, asking(regex="a"))
        assert one(other, SamplingParams(max_tokens=2)).outputs[0].token_ids


def test_documentation_example() -> None:
    page = (Path(__file__).parents[1] / "docs" / "structured-output.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, "docs/structured-output.md", "exec"), names)
    jsonschema.validate(json.loads(names["output"].text), names["person"])


def test_structured_output_options_of_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema, lark = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(json.dumps(PERSON))
    lark.write_text(NESTED)

    def run(*options: str) -> str:
        assert main(["run", "-q", "x", "--threads", "1", "-n", "200", *options]) == 0
        return capsys.readouterr().out.rstrip("\n")

    seeded = ("-n", "400", "--temperature", "1", "--seed", "1")
    jsonschema.validate(json.loads(run("--json-schema", str(schema), *seeded)), PERSON)
    assert re.fullmatch(r"\(*x\)*", run("--grammar", str(lark), *seeded))
    assert re.fullmatch("[0-9]{4}", run("--regex", "[0-9]{4}"))
    assert run("--choice", "blue,green") in {"blue", "green"}
    for options, message in [
        (("--choice", "a,b", "--regex", "a"), "--regex and --choice exclude each other"),
        (("--regex", ""), "structured_outputs.regex"),
        (("--json-schema", str(lark)), "structured_outputs.json"),
        (
            (
                "--json-schema",
                str(tmp_path / "structured_outputs must be exactly one of json, regex, choice, grammar,"),
            ),
            "structured_outputs must be exactly one of json, regex, choice, grammar,",
        ),
    ]:
        assert main(["run", "x", *options]) == 2
        assert message in capsys.readouterr().err
