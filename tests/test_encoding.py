"""`embed`, `classify` and `rerank`: reading of texts, requests to the engine, and meaning of its results."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fakes
from ferrule import LLM, InvalidParameterError, PromptError, TokenizerError, UnsupportedModelError, UnsupportedTaskError
from ferrule._engine.encoding.judge import AFTER, BEFORE, INSTRUCTION
from ferrule._engine.encoding.texts import TypedTokensPrompt
from test_encoders import GOLDEN
from word_tokenizer import write_word_tokenizer

PROMPTS = {"prompts": {"query": "w7 w8 ", "passage": "w9 ", "empty": ""}, "default_prompt_name": "passage"}


@pytest.fixture
def encoder(tmp_path: Path) -> Callable[..., Path]:
    """A golden encoder with a tokenizer of words, and other files as they are given."""

    def make(case: str, *, marks: dict[str, int] | None = None, ends: bool = True, **files: object) -> Path:
        folder = tmp_path / case
        shutil.copytree(GOLDEN / case, folder, copy_function=shutil.copyfile)
        write_word_tokenizer(folder, marks=marks, ends=ends)
        for name, content in files.items():
            (folder / f"{name}.json").write_text(json.dumps(content))
        return folder

    return make


@pytest.fixture
def open_llm(fake_engine: type[fakes.Engine], encoder: Callable[..., Path]) -> Callable[..., LLM]:
    """Creates an encoder on a fake engine."""
    return lambda case, *, options=None, **files: LLM(encoder(case, **files), **(options or {}))


def encode_calls(llm: LLM) -> tuple[list[list[int]], dict[str, Any]]:
    """The texts of all calls so far, and the task of the last."""
    engine: Any = llm._driver._engine
    return [ids for texts, _ in engine.encoded for ids in texts], json.loads(engine.encoded[-1][1])


def test_special_tokens_come_from_tokenizer(open_llm: Callable[..., LLM]) -> None:
    with open_llm("bert") as llm:
        outputs = llm.embed(["w10 w11", {"prompt_token_ids": [5, 6]}, {"prompt": "w12"}])
        assert [output.prompt_token_ids for output in outputs] == [[0, 10, 11, 2], [5, 6], [0, 12, 2]]
        assert all(output.outputs.embedding.shape == (64,) for output in outputs)
        assert all(output.outputs.embedding.dtype == np.float32 for output in outputs)
        assert outputs[0].outputs.embedding.flags.writeable
        assert llm.embed("w10 w11")[0].outputs.embedding.tolist() == outputs[0].outputs.embedding.tolist()
        assert llm.embed([]) == []


@pytest.mark.parametrize(
    ("case", "pooling", "normalize"),
    [
        ("bert", "mean", True),
        ("modernbert", "cls", True),
        ("xlm_roberta", "mean", False),
        ("qwen3", "last", True),
        ("bert_classifier", "mean", True),  # its files set no pooling
        ("qwen3_classifier", "last", True),
    ],
)
def test_pooling_follows_model_files(case: str, pooling: str, normalize: bool, open_llm: Callable[..., LLM]) -> None:
    with open_llm(case) as llm:
        llm.embed("w10")
        task = {"type": "embedding", "pooling": pooling, "normalize": normalize, "dimensions": None}
        assert encode_calls(llm)[1] == task
        llm.embed("w10", pooling="cls", normalize=not normalize, dimensions=8)
        assert encode_calls(llm)[1] == task | {"pooling": "cls", "normalize": not normalize, "dimensions": 8}


def test_pooling_none_returns_hidden_states(open_llm: Callable[..., LLM]) -> None:
    with open_llm("bert") as llm:
        outputs = llm.embed(["w10", "w10 w11 w12"], pooling="none")
        assert [output.outputs.embedding.shape for output in outputs] == [(3, 64), (5, 64)]
        assert encode_calls(llm)[1] == {"type": "token_embeddings", "normalize": False}
        with pytest.raises(InvalidParameterError, match=r"dimensions is not supported with pooling=.none., got 8"):
            llm.embed("w10", pooling="none", dimensions=8)


def test_an_empty_text_does_not_fail_its_batch(open_llm: Callable[..., LLM]) -> None:
    with open_llm("bert") as llm:
        outputs = llm.embed(["w10", "", "w11"])
        assert [output.prompt_token_ids for output in outputs] == [[0, 10, 2], [0, 2], [0, 11, 2]]
        assert outputs[1].outputs.embedding.any(), "computed from the special tokens"
        assert sorted(each.index for each in llm.rerank("w10", ["w11", ""])) == [0, 1]
    with open_llm("bert_classifier") as llm:
        assert llm.classify(["", ("w10", "")])[1].prompt_token_ids == [0, 10, 2, 2]
    with open_llm("qwen3", ends=False) as llm:
        alone = llm.embed(["w10", "w11"])
        outputs = llm.embed(["w10", "", "w11"])
        assert [output.prompt_token_ids for output in outputs] == [[10], [], [11]]
        assert outputs[1].outputs.embedding.tolist() == [0.0] * len(outputs[0].outputs.embedding)
        assert outputs[2].outputs.embedding.tolist() == alone[1].outputs.embedding.tolist()
        assert llm.embed("", dimensions=8)[0].outputs.embedding.tolist() == [0.0] * 8
        assert llm.embed(["", "w10"], pooling="none")[0].outputs.embedding.shape == (0, 64)
        assert llm.score("w10", "")[0].outputs.score == 0
        assert [each.index for each in llm.rerank("w10", ["w10", ""])] == [0, 1]
    with (
        open_llm("qwen3_classifier", ends=False) as llm,
        pytest.raises(PromptError, match=r"prompts\[1\]: the text has no tokens"),
    ):
        llm.classify(["w10", ""])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"pooling": "max"}, "pooling must be one of cls, mean, last, none, got 'max'"),
        ({"normalize": 1}, "normalize must be True or False, got 1"),
        ({"dimensions": 65}, "dimensions must be an integer from 1 to 64, got 65"),
        ({"dimensions": 0}, "dimensions must be an integer from 1 to 64, got 0"),
        ({"truncate_prompt_tokens": 71}, "truncate_prompt_tokens must be an integer from -1 to 70, got 71"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be -1 or an integer from 1 to 70, got 0"),
        ({"truncate_prompt_tokens": "all"}, "truncate_prompt_tokens must be an integer from -1 to 70, got 'all'"),
        ({"prompt_name": "query"}, "prompt_name must be None, since the model has no prompts, got 'query'"),
    ],
)
def test_invalid_parameters(arguments: dict[str, Any], words: str, open_llm: Callable[..., LLM]) -> None:
    with open_llm("bert") as llm, pytest.raises(InvalidParameterError) as caught:
        llm.embed("w10", **arguments)
    assert words in str(caught.value)


LONG = " ".join(["w10"] * 69)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([["w1"]], "prompts[0]: a prompt must be a string or {\"prompt_token_ids\": [...]}, got ['w1']"),
        ([5], 'prompts[0]: a prompt must be a string or {"prompt_token_ids": [...]}, got 5'),
        (None, 'prompts: a prompt must be a string or {"prompt_token_ids": [...]}, got None'),
        (b"w1", "prompts: a prompt must be a string or {\"prompt_token_ids\": [...]}, got b'w1'"),
        ([("w1", "w2")], "prompts[0]: a prompt must be a string or {\"prompt_token_ids\": [...]}, got ('w1',"),
        ("\ud800", "prompts: the text must be valid Unicode, got a lone surrogate, U+D800, at character 0"),
        ({"prompt_token_ids": []}, "prompts: the prompt has no tokens"),
        ({"prompt_token_ids": [320]}, "prompts: prompt_token_ids[0] must be from 0 to 319 (the vocabulary), got 320"),
        (
            {"prompt_token_ids": [1, 2], "token_type_ids": [0, 2]},
            "prompts: token_type_ids[1] must be an integer from 0 to 1, got 2",
        ),
        ({"prompt_token_ids": [1, 2], "token_type_ids": [0]}, "prompts: token_type_ids must have 2 entries, got 1"),
        (
            {"prompt_token_ids": [1, 2], "token_type_ids": "01"},
            "prompts: token_type_ids must be a list of integers, got '01'",
        ),
        ({"prompt": "w1", "token_type_ids": [0]}, "prompts: token_type_ids require prompt_token_ids"),
        (
            {"prompt_token_ids": [1], "color": 1},
            "prompts: a prompt with prompt_token_ids may also have prompt, cache_salt and multi_modal_data, got",
        ),
        (LONG, "prompts: the text has 71 tokens, more than the limit of 70 (max_seq_length of"),
        (
            {"prompt_token_ids": [5] * 71},
            "prompts: the text has 71 tokens, more than the limit of 70 (max_seq_length of",
        ),
    ],
)
def test_invalid_texts(given: Any, words: str, open_llm: Callable[..., LLM]) -> None:
    with open_llm("bert") as llm:
        with pytest.raises(PromptError) as caught:
            llm.embed(given)
        assert words in str(caught.value)
        engine: Any = llm._driver._engine
        assert not engine.encoded


def test_tuple_is_a_text_pair_only_for_classifiers(open_llm: Callable[..., LLM]) -> None:
    with open_llm("bert_classifier") as llm:
        assert len(llm.embed(("w10", "w11"))) == 2
        assert [o.prompt_token_ids for o in llm.classify(("w10", "w11"))] == [[0, 10, 2, 11, 2]]
        assert [o.prompt_token_ids for o in llm.classify(["w10", ("w11", "w12")])] == [[0, 10, 2], [0, 11, 2, 12, 2]]
        with pytest.raises(PromptError, match=r"prompts\[0\] must be a string or a pair of strings, got \('w1', 5\)"):
            llm.classify([("w1", 5)])  # type: ignore[list-item]


def test_truncate_prompt_tokens(open_llm: Callable[..., LLM]) -> None:
    with open_llm("bert") as llm:
        assert len(llm.embed(LONG, truncate_prompt_tokens=-1)[0].prompt_token_ids) == 70
        cut = llm.embed(["w10 w11 w12", "w13", {"prompt_token_ids": [5, 6, 7, 8, 9]}], truncate_prompt_tokens=4)
        assert [o.prompt_token_ids for o in cut] == [[0, 10, 11, 2], [0, 13, 2], [5, 6, 7, 8]]
        with pytest.raises(
            PromptError, match="prompts: truncate_prompt_tokens must be at least 3, 2 special tokens and one of"
        ):
            llm.embed("w10", truncate_prompt_tokens=2)


def test_longer_text_of_pair_is_truncated_first(open_llm: Callable[..., LLM]) -> None:
    def cut(first: int, second: int, most: int) -> tuple[int, int]:
        pair = (" ".join(["w10"] * first), " ".join(["w11"] * second))
        ids = llm.classify([pair], truncate_prompt_tokens=most)[0].prompt_token_ids
        assert len(ids) <= most
        assert (ids[0], ids[-1], ids.count(2)) == (0, 2, 2)
        return ids.count(10), ids.count(11)

    with open_llm("bert_classifier") as llm:
        assert cut(3, 4, 10) == (3, 4)
        assert cut(2, 9, 10) == (2, 5)
        assert cut(9, 2, 10) == (5, 2)
        assert cut(9, 9, 10) == (4, 3)
        assert cut(9, 9, 5) == (1, 1)
        with pytest.raises(
            PromptError, match=r"prompts\[0\]: truncate_prompt_tokens must be at least 5, 3 special tokens and one"
        ):
            cut(9, 9, 4)


def test_explicit_max_model_len_overrides_model_files(open_llm: Callable[..., LLM]) -> None:
    with open_llm("bert", options={"max_model_len": 96}) as llm:
        assert len(llm.embed(LONG)[0].prompt_token_ids) == 71


def test_named_prompts_are_prepended(open_llm: Callable[..., LLM]) -> None:
    with open_llm("bert", config_sentence_transformers=PROMPTS) as llm:
        assert llm.embed("w10")[0].prompt_token_ids == [0, 9, 10, 2]
        assert llm.embed("w10", prompt_name="query")[0].prompt_token_ids == [0, 7, 8, 10, 2]
        assert llm.embed("w10", prompt_name="empty")[0].prompt_token_ids == [0, 10, 2]
        assert llm.embed({"prompt_token_ids": [5]})[0].prompt_token_ids == [5]
        with pytest.raises(InvalidParameterError, match="prompt_name must be one of query, passage, empty, got 'x'"):
            llm.embed("w10", prompt_name="x")


def test_include_prompt_false_is_unsupported(encoder: Callable[..., Path], fake_engine: type[fakes.Engine]) -> None:
    folder = encoder("bert", config_sentence_transformers=PROMPTS)
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({"pooling_mode": "mean", "include_prompt": False}))
    with LLM(folder) as llm:
        assert llm.embed("w10", prompt_name="empty")
        with pytest.raises(UnsupportedModelError, match="include_prompt is false"):
            llm.embed("w10")


def test_do_lower_case(open_llm: Callable[..., LLM]) -> None:
    settings = {"sentence_bert_config": {"do_lower_case": True}}
    with open_llm("bert", **settings) as llm:
        assert llm.embed("W10")[0].prompt_token_ids == [0, 10, 2]


def test_token_type_ids_for_models_that_use_them(open_llm: Callable[..., LLM]) -> None:
    def types(llm: LLM) -> list[int]:
        plan = llm._encoding.classify([("w10", "w11")], truncate_prompt_tokens=None)
        return plan.texts[0].token_type_ids

    with open_llm("bert_classifier") as llm:
        assert types(llm) == [0, 0, 0, 1, 1]
    with open_llm("xlm_roberta_classifier") as llm:
        assert types(llm) == []


def test_model_input_names_without_token_type_ids(open_llm: Callable[..., LLM]) -> None:
    settings = {"tokenizer_config": {"model_input_names": ["input_ids", "attention_mask"]}}
    with open_llm("bert_classifier", **settings) as llm:
        plan = llm._encoding.classify([("w10", "w11")], truncate_prompt_tokens=None)
        assert plan.texts[0].token_type_ids == []


def test_without_tokenizer_only_token_ids_are_accepted(fake_engine: type[fakes.Engine]) -> None:
    with LLM(GOLDEN / "bert") as llm:
        assert llm.embed({"prompt_token_ids": [5]})
        with pytest.raises(TokenizerError, match="give token ids"):
            llm.embed("w10")


def test_classifier_logits_become_probabilities(open_llm: Callable[..., LLM], encoder: Callable[..., Path]) -> None:
    with open_llm("modernbert_classifier_mean") as llm:
        output = llm.classify("w10")[0]
        weights = np.exp(output.outputs.logits.astype(np.float64))
        assert np.allclose(output.outputs.probs, weights / weights.sum())
        assert output.outputs.label == f"LABEL_{output.outputs.logits.argmax()}"
    with open_llm("bert_classifier") as llm:
        output = llm.classify("w10")[0]
        assert np.allclose(output.outputs.probs, 1 / (1 + np.exp(-output.outputs.logits)))
    folder = encoder("qwen3_classifier")
    config = json.loads((folder / "config.json").read_text())
    config |= {"problem_type": "multi_label_classification", "id2label": {"2": "c", "0": "a", "1": "b"}}
    (folder / "config.json").write_text(json.dumps(config))
    with LLM(folder) as llm:
        output = llm.classify("w10")[0]
        assert np.allclose(output.outputs.probs, 1 / (1 + np.exp(-output.outputs.logits)))
        assert output.outputs.label == "abc"[output.outputs.logits.argmax()]


def test_classify_requires_classifier(llm: LLM) -> None:
    with pytest.raises(UnsupportedTaskError, match="tiny has no classifier; it generates text"):
        llm.classify("x")


@pytest.mark.parametrize(
    "ask",
    [
        lambda llm: llm.generate("w10"),
        lambda llm: llm.stream("w10"),
        lambda llm: llm.chat([{"role": "user", "content": "w10"}]),
        lambda llm: llm.loglikelihood("w10", "w11"),
        lambda llm: llm.explain("w10"),
        lambda llm: llm.logits([5]),
        lambda llm: llm.save_state("w10"),
        lambda llm: llm.next_token_probs("w10"),
    ],
)
def test_encoders_cannot_generate(ask: Callable[[LLM], object], open_llm: Callable[..., LLM]) -> None:
    for case, made_for in (
        ("bert", "it embeds texts"),
        ("xlm_roberta_classifier", "it classifies and reranks"),
        ("qwen3_classifier", "it classifies"),
        ("gemma3", "it embeds texts"),
    ):
        with open_llm(case) as llm, pytest.raises(UnsupportedTaskError, match=f"{made_for}$"):
            ask(llm)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_cross_encoder_reranks_pairs(open_llm: Callable[..., LLM]) -> None:
    documents = ["w11", "w12 w13", "w14"]
    with open_llm("bert_classifier") as llm:
        ranked = llm.rerank("w10", documents)
        assert encode_calls(llm) == ([[0, 10, 2, 11, 2], [0, 10, 2, 12, 13, 2], [0, 10, 2, 14, 2]], {"type": "scores"})
        scores = [
            sigmoid(float(o.outputs.logits[0])) for o in llm.classify([("w10", document) for document in documents])
        ]
        assert [o.index for o in ranked] == sorted(range(3), key=lambda index: -scores[index])
        assert all(o.relevance_score == pytest.approx(scores[o.index]) for o in ranked)
        assert all(o.document == documents[o.index] for o in ranked)
        assert [o.prompt_tokens for o in ranked] == [5 + 6 + 5] * 3
        assert llm.rerank("w10", documents, top_n=2) == ranked[:2]
        assert llm.rerank("w10", documents, top_n=9) == ranked
        assert llm.rerank("w10", []) == []
        # Equal scores keep their order.
        assert [o.index for o in llm.rerank("w10", ["w11", "w11"])] == [0, 1]


def test_embedding_model_reranks_by_cosine(open_llm: Callable[..., LLM]) -> None:
    with open_llm("bert", config_sentence_transformers=PROMPTS) as llm:
        ranked = llm.rerank("w10", ["w11", "w10"])
        assert encode_calls(llm)[0] == [[0, 7, 8, 10, 2], [0, 9, 11, 2], [0, 9, 10, 2]]
        assert [o.prompt_tokens for o in ranked] == [5 + 4 + 4] * 2
        assert llm.rerank("w10", []) == []
        assert len(encode_calls(llm)[0]) == 3, "nothing is read to rank nothing"
        query = llm.embed("w10", prompt_name="query")[0].outputs.embedding
        for output in ranked:
            cosine = float(query @ llm.embed(output.document)[0].outputs.embedding)
            assert output.relevance_score == pytest.approx((1 + cosine) / 2, abs=1e-6)
        assert ranked[0].relevance_score > ranked[1].relevance_score
    with open_llm("xlm_roberta") as llm:
        llm.rerank("w10", ["w11"])
        assert encode_calls(llm)[0] == [[0, 10, 2], [0, 11, 2]]
        assert encode_calls(llm)[1]["normalize"], "lengths say nothing, though this model's embeddings have some"


MARKS = {"<|im_start|>": 300, "<|im_end|>": 301, "yes": 302, "no": 303}


def judge(encoder: Callable[..., Path], **changes: Any) -> Path:
    """A decoder with Qwen's special tokens and without files of an embedding model."""
    folder = encoder("qwen3", marks=MARKS, ends=False)
    shutil.rmtree(folder / "1_Pooling")
    for name in ("modules.json", "sentence_bert_config.json"):
        (folder / name).unlink()
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_reranker_decoder_uses_its_prompt_template(
    encoder: Callable[..., Path], fake_engine: type[fakes.Engine]
) -> None:
    with LLM(judge(encoder)) as llm:

        def prompt(document: str, instruction: str = INSTRUCTION) -> list[int]:
            instruct = f"<Instruct>: {instruction}\n<Query>: w10\n<Document>: {document}"
            parts = (BEFORE, instruct, AFTER)
            return [token for part in parts for token in llm.tokenize(part, add_special_tokens=False)]

        ranked = llm.rerank("w10", ["w11", "w12"])
        assert encode_calls(llm) == ([prompt("w11"), prompt("w12")], {"type": "logits", "tokens": [302, 303]})
        assert ranked[0].prompt_tokens == len(prompt("w11")) + len(prompt("w12"))
        assert 0 < ranked[1].relevance_score < ranked[0].relevance_score < 1
        llm.rerank("w10", ["w11"], instruction="w20 w21")
        assert encode_calls(llm)[0][-1] == prompt("w11", "w20 w21")
        llm.rerank("w10", ["w11 " * 300], truncate_prompt_tokens=100)
        cut = encode_calls(llm)[0][-1]
        assert len(cut) == 100
        assert cut[-len(llm.tokenize(AFTER)) :] == llm.tokenize(AFTER)
        with pytest.raises(PromptError, match=r"documents\[0\]: the text has 355 tokens, more than the limit of 256"):
            llm.rerank("w10", ["w11 " * 300])
        with pytest.raises(
            PromptError, match=r"^truncate_prompt_tokens must be more than the 39 tokens of the prompt, got 9"
        ):
            llm.rerank("w10", ["w11"], truncate_prompt_tokens=9)
        with pytest.raises(InvalidParameterError, match="instruction must be a string, got 5"):
            llm.rerank("w10", ["w11"], instruction=5)  # type: ignore[arg-type]


def test_reranker_decoder_with_other_answer_tokens_is_unsupported(
    encoder: Callable[..., Path], fake_engine: type[fakes.Engine]
) -> None:
    folder = judge(encoder)
    modules = [{"type": "base.Transformer", "path": ""}, {"type": "x.LogitScore", "path": "1_LogitScore"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    settings = folder / "1_LogitScore" / "config.json"
    for tokens, refused in (((302, 303), False), ((302, 5), True)):
        settings.write_text(json.dumps({"true_token_id": tokens[0], "false_token_id": tokens[1]}))
        with LLM(folder) as llm:
            if not refused:
                llm.rerank("w10", ["w11"])
                assert encode_calls(llm)[1]["type"] == "logits"
                continue
            with pytest.raises(
                UnsupportedTaskError,
                match=r"reranks by the tokens .302, 5.; supported are rerankers that answer yes or no",
            ):
                llm.rerank("w10", ["w11"])


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"query": 5}, PromptError, "query must be a string, got 5"),
        ({"query": ""}, PromptError, "query must not be empty"),
        ({"documents": "w11"}, PromptError, "documents must be a list of strings, got 'w11'"),
        ({"documents": ["w11", 5]}, PromptError, "documents[1] must be a string, got 5"),
        ({"documents": [LONG]}, PromptError, "documents[0]: the text has"),
        ({"top_n": 0}, InvalidParameterError, "top_n must be an integer from 1 to 2147483647, got 0"),
        (
            {"instruction": "x"},
            InvalidParameterError,
            "instruction must be None, since this model takes no instruction, got 'x'",
        ),
    ],
)
@pytest.mark.parametrize("case", ["bert", "xlm_roberta_classifier"])
def test_invalid_rerank_arguments(
    case: str, arguments: dict[str, Any], error: type[Exception], words: str, open_llm: Callable[..., LLM]
) -> None:
    given: dict[str, Any] = {"query": "w10", "documents": ["w11"]} | arguments
    with open_llm(case) as llm, pytest.raises(error) as caught:
        llm.rerank(**given)
    assert words in str(caught.value)


def test_rerank_requires_single_label(open_llm: Callable[..., LLM]) -> None:
    with open_llm("qwen3_classifier") as llm, pytest.raises(UnsupportedTaskError, match="has 3 labels"):
        llm.rerank("w10", ["w11"])


def test_batches_fit_in_a_step(open_llm: Callable[..., LLM]) -> None:
    with open_llm("bert", options={"max_num_seqs": 3}) as llm:
        engine: Any = llm._driver._engine
        lengths = [1, 1, 1, 1, 70, 70, 70, 70, 70, 70, 70, 70, 70]
        outputs = llm.embed([{"prompt_token_ids": [5] * length} for length in lengths])
        assert [len(texts) for texts, _ in engine.encoded] == [3, 3, 3, 3, 1]
        assert len(outputs) == len(lengths)
        engine.encoded.clear()
    with open_llm("xlm_roberta", options={"max_num_seqs": 100}) as llm:
        engine = llm._driver._engine
        llm.embed([{"prompt_token_ids": [5] * 70} for _ in range(15)])
        assert [len(texts) for texts, _ in engine.encoded] == [7, 7, 1]  # of at most 512 tokens


@pytest.mark.native
def test_cross_encoder_scores_equal_transformers(encoder: Callable[..., Path]) -> None:
    """The score of a pair equals the golden classifier's score for the same ids and token types."""
    with np.load(GOLDEN / "bert_classifier" / "golden.npz") as golden:
        ids, kinds = golden["input_ids_1"].tolist(), golden["token_type_ids_1"].tolist()
    second = kinds.index(1)
    words = [f"w{number}" for number in ids if number not in (0, 2, 3)]
    pair = (" ".join(words[: second - 2]), " ".join(words[second - 2 :]))
    with LLM(encoder("bert_classifier"), quantization="f32") as llm:
        read = llm._encoding.classify([pair], truncate_prompt_tokens=None).texts[0]
        given: TypedTokensPrompt = {"prompt_token_ids": read.token_ids, "token_type_ids": read.token_type_ids}
        assert set(read.token_type_ids) == {0, 1}
        logit = float(llm.classify([given])[0].outputs.logits[0])
        untyped = float(llm.classify([{"prompt_token_ids": read.token_ids}])[0].outputs.logits[0])
        assert logit != untyped
        assert llm.rerank(pair[0], [pair[1]])[0].relevance_score == pytest.approx(sigmoid(logit))


@pytest.mark.native
def test_reranker_decoder_score_equals_softmax_of_logits(encoder: Callable[..., Path]) -> None:
    with LLM(judge(encoder), quantization="f32", max_num_batched_tokens=40) as llm:
        documents = ["w11", "w12 w13 w14", "w15 " * 60]
        plan = llm._encoding.rerank("w10", documents, top_n=None, instruction=None, truncate_prompt_tokens=None)
        expected: list[float] = []
        for text in plan.texts:
            row = llm.logits(text.token_ids)[-1].astype(np.float64)
            expected.append(float(np.exp(row[302]) / (np.exp(row[302]) + np.exp(row[303]))))
        ranked = llm.rerank("w10", documents)
        assert [o.relevance_score for o in ranked] == pytest.approx(sorted(expected, reverse=True), abs=1e-6)
        assert all(o.relevance_score == pytest.approx(expected[o.index], abs=1e-6) for o in ranked)


@pytest.mark.native
def test_embedded_model_embeds() -> None:
    with LLM() as llm:
        cat, dog, law = (
            output.outputs.embedding
            for output in llm.embed(["The cat sat on the mat.", "The dog sat on the mat.", "Article 5 of the treaty"])
        )
        assert float(cat @ cat) == pytest.approx(1, abs=1e-6)
        assert float(cat @ dog) > float(cat @ law)
        assert llm.rerank("The cat sat on the mat.", ["Article 5", "The dog sat on the mat."])[0].index == 1
