"""Invalid configurations, prompts and parameters on the real engine, each in a separate process.

The tests of each module cover more variants.
"""

import json
import shutil
from pathlib import Path

import pytest

from faults.isolated import PROMISED_SECONDS, SLACK, assert_refused, run

GOLDEN = Path(__file__).parents[1] / "golden" / "logits" / "llama"
WARM_UP = """
    from ferrule import LLM, SamplingParams
    llm = LLM(threads=1, max_model_len=512)
    llm.generate("Hi", SamplingParams(max_tokens=2))
    llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=2))
    from ferrule import BeamSearchParams, StructuredOutputsParams
    def structured(**structure):
        params = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(**structure))
        return llm.generate("Hi", params)
    structured(json_object=True)
    def beams(**search):
        return llm.beam_search("Hi", BeamSearchParams(**{"beam_width": 2, "max_tokens": 8, **search}))
    beams()
"""


@pytest.mark.parametrize(
    ("error", "changes", "fragments"),
    [
        ("ConfigError", {"num_attention_heads": 0}, ["num_attention_heads must be an integer from 1 to 1024, got 0"]),
        ("ConfigError", {"num_key_value_heads": 3}, ["num_key_value_heads", "3", "4"]),
        ("ConfigError", {"hidden_size": -64}, ["hidden_size must be an integer from 1 to 268435456, got -64"]),
        (
            "ConfigError",
            {"num_hidden_layers": 10**9},
            ["num_hidden_layers must be", "1000000000"],
        ),
        ("ConfigError", {"vocab_size": 321}, ["model.embed_tokens.weight", "320", "321"]),
        ("UnsupportedModelError", {"architectures": ["LlamaForCausalLN"], "model_type": "lama"}, ["LlamaForCausalLM"]),
        (
            "ConfigError",
            {"rope_parameters": {"rope_type": "linear", "factor": 0}},
            ["factor must be", "got 0"],
        ),
        (
            "ConfigError",
            {"rope_parameters": {"rope_type": "yarn", "factor": float("nan")}},
            ["factor must be", "got nan"],
        ),
    ],
)
def test_invalid_config_is_a_typed_error(
    error: str, changes: dict[str, object], fragments: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN, folder)
    config = json.loads((GOLDEN / "config.json").read_text()) | changes
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    outcome = run("LLM(arguments[0], threads=1)", str(folder), warm_up=WARM_UP)
    assert_refused(outcome, error, fragments)


def test_custom_code_of_model_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN, folder)
    config = json.loads((GOLDEN / "config.json").read_text()) | {"auto_map": {"AutoConfig": "evil.Evil"}}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    names = {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "evil.py").write_text("raise SystemExit('the code of a model ran')")
    assert run("LLM(arguments[0], threads=1)", str(folder), warm_up=WARM_UP).error is None


@pytest.mark.parametrize(
    ("fault", "error", "fragments"),
    [
        (r"llm.generate('\ud800')", "PromptError", []),
        ("llm.detokenize([4096])", "PromptError", ["4096"]),
        ("llm.detokenize([-1])", "PromptError", ["-1"]),
        (
            "llm.chat([{'role': 'user', 'content': 'x'}], chat_template='{{ x.__class__.__mro__[1] }}')",
            "ChatTemplateError",
            [],
        ),
        ("SamplingParams(temperature=-1)", "InvalidParameterError", ["temperature", "-1"]),
        ("SamplingParams(temperature=float('nan'))", "InvalidParameterError", ["temperature", "nan"]),
        ("SamplingParams(temperature=1e308)", "InvalidParameterError", ["temperature", "1e+308"]),
        ("SamplingParams(top_p=2)", "InvalidParameterError", ["top_p", "2"]),
        ("SamplingParams(min_p=2)", "InvalidParameterError", ["min_p", "2"]),
        ("SamplingParams(repetition_penalty=0)", "InvalidParameterError", ["repetition_penalty", "0"]),
        ("SamplingParams(dynatemp_range=-1)", "InvalidParameterError", ["dynatemp_range", "-1", "0 to 100"]),
        ("SamplingParams(typical_p=0)", "InvalidParameterError", ["typical_p", "0"]),
        ("SamplingParams(dry_base=float('nan'))", "InvalidParameterError", ["dry_base", "nan", "1 to 100"]),
        ("SamplingParams(mirostat_tau=float('inf'))", "InvalidParameterError", ["mirostat_tau", "inf"]),
        ("SamplingParams(mirostat=3)", "InvalidParameterError", ["mirostat", "3", "0 to 2"]),
        ("SamplingParams(no_repeat_ngram_size=2**63)", "InvalidParameterError", ["no_repeat_ngram_size", "1024"]),
        ("llm.generate('x', SamplingParams(allowed_token_ids=[4096]))", "InvalidParameterError", ["4096", "4095"]),
        ("llm.generate('x', SamplingParams(bad_words_ids=[[1, 4096]]))", "InvalidParameterError", ["4096", "4095"]),
        ("SamplingParams(allowed_token_ids=[])", "InvalidParameterError", ["allowed_token_ids", "at least one"]),
        (
            "SamplingParams(bad_words=['x'] * 10**5)",
            "InvalidParameterError",
            ["bad_words must be a list of at most 512 strings, got a list of 100000 items"],
        ),
        ("SamplingParams(dry_sequence_breakers=[''])", "InvalidParameterError", ["dry_sequence_breakers[0]"]),
        (
            "llm.generate('x', SamplingParams(bad_words=['x y z ' * 600]))",
            "InvalidParameterError",
            ["bad_words[0]", "256"],
        ),
        ("SamplingParams(logits_processors=[3])", "InvalidParameterError", ["logits_processors[0]", "3"]),
        (
            "llm.generate('x', SamplingParams(logits_processors=[lambda tokens, logits: 1 / 0]))",
            "LogitsProcessorError",
            ["logits_processors[0]", "ZeroDivisionError"],
        ),
        ("SamplingParams(top_k=-5)", "InvalidParameterError", ["top_k", "-5"]),
        ("SamplingParams(top_k=2**63)", "InvalidParameterError", ["top_k", "9223372036854775808"]),
        (
            "SamplingParams(n=10**9)",
            "InvalidParameterError",
            ["n must be an integer from 1 to 128, got 1000000000"],
        ),
        ("SamplingParams(logprobs=10**6)", "InvalidParameterError", ["logprobs", "1000000"]),
        ("SamplingParams(prompt_logprobs=10**6)", "InvalidParameterError", ["prompt_logprobs", "1000000"]),
        (
            "beams(length_penalty=float('nan'))",
            "InvalidParameterError",
            ["length_penalty must be a number from -10 to 10, got nan"],
        ),
        ("beams(beam_width=0)", "InvalidParameterError", ["beam_width must be an integer from 1 to 128, got 0"]),
        (
            "beams(beam_width=10**9)",
            "InvalidParameterError",
            ["beam_width must be an integer from 1 to 128, got 1000000000"],
        ),
        ("beams(n=3)", "InvalidParameterError", ["n must be at most beam_width (2), got 3"]),
        (
            "SamplingParams(best_of=10**9)",
            "InvalidParameterError",
            ["best_of must be an integer from 1 to 128, got 1000000000"],
        ),
        (
            "beams(early_stopping='maybe')",
            "InvalidParameterError",
            ["early_stopping must be True, False or 'never', got 'maybe'"],
        ),
        (
            "beams(stop='x')",
            "InvalidParameterError",
            ["stop is not supported in a beam search, got 'x'; use stop_token_ids"],
        ),
        ("SamplingParams(max_tokens=-1)", "InvalidParameterError", ["max_tokens", "-1"]),
        ("SamplingParams(max_tokens=2**63)", "InvalidParameterError", ["max_tokens"]),
        ("llm.generate('x', SamplingParams(logit_bias={4096: 1.0}))", "InvalidParameterError", ["4096", "4095"]),
        ("llm.generate('x', SamplingParams(stop_token_ids=[4096]))", "InvalidParameterError", ["4096"]),
        ("llm.generate({'prompt_token_ids': [5, -1]})", "PromptError", ["prompt_token_ids[1]", "-1"]),
        ("SamplingParams(stop='')", "InvalidParameterError", ["stop"]),
        (
            "SamplingParams(stop=['x'] * 10**5)",
            "InvalidParameterError",
            ["stop must be a list of at most 256 strings, got a list of 100000 items"],
        ),
        ("llm.generate({'prompt_token_ids': []})", "PromptError", ["the prompt has no tokens"]),
        ("llm.generate({'prompt_token_ids': [5] * 512})", "PromptTooLongError", ["512", "max_model_len", "511"]),
        ("structured(json='false')", "InvalidParameterError", ["structured_outputs.json", "false"]),
        (
            "structured(json={'type': 'integer', 'minimum': 5, 'maximum': 3})",
            "InvalidParameterError",
            ["minimum (5)"],
        ),
        ("structured(json={'$ref': '#'})", "InvalidParameterError", ["structured_outputs.json", "no output"]),
        ("structured(json='{\"not\":' * 10**5)", "InvalidParameterError", ["nested at most 100 levels deep"]),
        ("structured(json='x' * 2**21)", "InvalidParameterError", ["2097152", "1048576"]),
        ("structured(json={'multipleOf': 1000003})", "InvalidParameterError", ["1000003", "10000"]),
        ("structured(regex='(')", "InvalidParameterError", ["structured_outputs.regex"]),
        ("structured(regex='[a&&b]')", "InvalidParameterError", ["structured_outputs.regex", "no output"]),
        (r"structured(regex='\ud800')", "InvalidParameterError", ["structured_outputs"]),
        ("structured(choice=['x'] * 10001)", "InvalidParameterError", ["10001", "10000"]),
        ("structured(grammar='start: start')", "InvalidParameterError", ["structured_outputs.grammar"]),
        ("structured(grammar='start: ' + '(' * 60000)", "InvalidParameterError", ["nested"]),
        ("structured(grammar='start: ' + 'a' * 10**6)", "InvalidParameterError", ["65536"]),
        (r"llm.embed('\ud800')", "PromptError", ["U+D800"]),
        ("llm.embed({'prompt_token_ids': [5, 4096]})", "PromptError", ["prompt_token_ids[1]", "4096"]),
        ("llm.embed({'prompt_token_ids': [5] * 513})", "PromptError", ["513", "512", "max_model_len"]),
        ("llm.embed('x', pooling='max')", "InvalidParameterError", ["pooling", "max"]),
        ("llm.embed('x', dimensions=2**63)", "InvalidParameterError", ["dimensions"]),
        ("llm.rerank('x', ['y'], instruction='z')", "InvalidParameterError", ["instruction"]),
    ],
)
def test_invalid_request_is_a_typed_error(fault: str, error: str, fragments: list[str]) -> None:
    assert_refused(run(fault, warm_up=WARM_UP), error, fragments)


def test_prompt_larger_than_kv_cache() -> None:
    warm_up = "from ferrule import LLM\nllm = LLM(threads=1, kv_cache_memory=200_000)"
    outcome = run("llm.generate({'prompt_token_ids': [5] * 100})", warm_up=warm_up)
    assert_refused(outcome, "PromptTooLongError", ["100", "kv_cache_memory"])


@pytest.mark.parametrize(
    "structure",
    [
        "json={'type': 'string', 'minLength': 10**9}",
        "json={'type': 'array', 'minItems': 10**9}",
        "json={'type': 'object', 'properties': {'a': {'$ref': '#'}}, 'required': ['a']}",
        "json={'enum': [f'v{n}' for n in range(20000)]}",
        "regex='((a{100}){100}){100}'",
        "regex='.*a.{3000}b'",
        "grammar='start: start start | \"a\"'",
    ],
)
def test_long_grammar_compiles_in_time(structure: str) -> None:
    """The longest valid grammar compiles within the time limit of other requests."""
    outcome = run(f"structured({structure})", warm_up=WARM_UP)
    assert outcome.error is None, outcome.message
    assert outcome.seconds < PROMISED_SECONDS * SLACK
