"""Tokenizers built from a GGUF's vocabulary against `tokenizers`' own, on random and adversarial texts."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import pytest
import tokenizers
from gguf import GGUFWriter, TokenType
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from conftest import TINY
from ferrule import TokenizerError, UnsupportedModelError
from ferrule._loading.gguf import merges as stored_merges
from ferrule._loading.gguf.pre_tokenizers import PRE_TOKENIZERS
from ferrule._loading.gguf.vocabulary import Vocabulary, read_vocabulary
from ferrule._text.tokenizer import Tokenizer
from ferrule.archs.config import Config
from gguf_convert import add_tokenizer

pytestmark = pytest.mark.native

TEXTS = 10_000
WORDS = (Path(__file__).parents[1] / "README.md").read_text().split(" ")
SCRIPTS = [(0x20, 0x7F), (0xA0, 0x180), (0x370, 0x400), (0x4E00, 0x4F00), (0x600, 0x6FF), (0x1F600, 0x1F650), (0, 0x20)]
PIECES = [
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "'s",
    "'LL",
    "▁",
    "<0x0A>",
    "12345",
    "à",
    "e\u0301",
    "👩‍👩‍👧",
    "\u200d",
    "ﬁ",
    "\x00",
]
LONG = 1_000_000


def texts(special: Sequence[str], count: int = TEXTS) -> list[str]:
    """Texts of words, other scripts, control characters, whole and partial special tokens, and repeated characters."""
    draw = random.Random(38)

    def part() -> str:
        match draw.randrange(6):
            case 0 | 1:
                return " ".join(draw.choices(WORDS, k=draw.randint(1, 6)))
            case 2:
                low, high = draw.choice(SCRIPTS)
                return "".join(chr(draw.randrange(low, high)) for _ in range(draw.randint(1, 12)))
            case 3:
                return "".join(draw.choices(PIECES, k=draw.randint(1, 5)))
            case 4:
                token = draw.choice(special)
                return token[draw.randrange(2) :]
            case _:
                return draw.choice("a ^0\n'é") * draw.randint(1, 40)

    return ["", " ", "a", *("".join(part() for _ in range(draw.randint(1, 4))) for _ in range(count - 3))]


def write(path: Path, fill: Callable[[GGUFWriter], None]) -> Path:
    """Writes a GGUF file with only a vocabulary."""
    writer = GGUFWriter(path, "llama")
    fill(writer)
    return written(writer)


def written(writer: GGUFWriter) -> Path:
    """Writes a tensor, which every file must have, and the metadata."""
    writer.add_tensor("token_embd.weight", gguf.np.zeros((1, 32), dtype=gguf.np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert writer.path is not None
    return Path(writer.path)


def check_same(tokenizer: Tokenizer, oracle: tokenizers.Tokenizer, samples: Sequence[str]) -> None:
    expected = oracle.encode_batch(list(samples), add_special_tokens=False)
    for text, encoding in zip(samples, expected, strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == encoding.ids, text


def test_embedded_tokenizer(tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf", lambda writer: add_tokenizer(writer, TINY))
    tokenizer, own = Tokenizer(file), Tokenizer(TINY)
    oracle = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    samples = texts(["<|end|>", "<|user|>", "<|bos|>"])
    check_same(tokenizer, oracle, samples)
    for text in samples[:1000]:
        ids = own.encode(text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == own.decode(ids)
        assert tokenizer.decode(ids, skip_special_tokens=False) == own.decode(ids, skip_special_tokens=False)
    assert tokenizer.chat_templates == own.chat_templates
    assert {
        role: own.special_tokens[role] for role in ("bos_token", "eos_token")
    }.items() <= tokenizer.special_tokens.items()


def sentencepiece_like(*, first_space: bool) -> tuple[tokenizers.Tokenizer, list[float]]:
    """Builds a BPE with byte fallback whose merges follow from scores, as transformers converts SentencePiece."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    spaces: normalizers.Normalizer = normalizers.Replace(" ", "▁")
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if first_space else spaces
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("▁"), "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    trained.train_from_iterator([" ".join(WORDS)], trainer)
    described = json.loads(trained.to_str())
    vocabulary: dict[str, int] = described["model"]["vocab"]
    pieces = sorted(vocabulary, key=lambda piece: vocabulary[piece])
    tokens = [*pieces[:3], *(f"<0x{byte:02X}>" for byte in range(256)), *pieces[3:], "<tool>", "▁▁▁▁"]
    vocab = {token: index for index, token in enumerate(tokens)}
    scores = [0.0 if index < 259 else float(259 - index) for index in range(len(tokens))]
    ordinary = {token for token, index in vocab.items() if index >= 259}
    merges = [
        (-scores[vocab[piece]], -cut, cut - len(piece), vocab[piece[:cut]], piece[:cut], piece[cut:])
        for piece in ordinary
        for cut in range(1, len(piece))
        if piece[:cut] in ordinary and piece[cut:] in ordinary
    ]
    model = models.BPE(
        vocab, [pair[-2:] for pair in sorted(merges)], unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    oracle = tokenizers.Tokenizer(model)
    oracle.normalizer = trained.normalizer
    oracle.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    oracle.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[:3]])
    oracle.add_tokens([AddedToken("<tool>", normalized=False)])
    return oracle, scores


def test_merges_of_a_large_vocabulary_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = ["<unk>", "a", "b", "ab", "aba", "ba", "abab", "unused"]
    types = [TokenType.UNKNOWN, *[TokenType.NORMAL] * 6, TokenType.UNUSED]
    values = {"tokenizer.ggml.scores": [0.0, -1.0, -2.0, -3.0, -3.0, -4.0, -5.0, 0.0]}
    ids = {token: index for index, token in enumerate(tokens)}
    vocabulary = Vocabulary(Config(values, tmp_path / "x.gguf"), tokens, list(types), ids)
    expected = [("ab", "a"), ("a", "b"), ("b", "a"), ("aba", "b")]
    monkeypatch.setenv("FERRULE_CACHE", str(tmp_path))
    assert stored_merges.merges_of(vocabulary) == expected
    assert list(tmp_path.iterdir()) == [], "a small vocabulary is not stored"
    monkeypatch.setattr(stored_merges, "LARGE", 1)
    assert stored_merges.merges_of(vocabulary) == expected
    (stored,) = (tmp_path / "merges").iterdir()
    monkeypatch.setattr(stored_merges, "_derived", lambda *_: pytest.fail("the merges are read"))
    assert stored_merges.merges_of(vocabulary) == expected
    monkeypatch.undo()
    monkeypatch.setenv("FERRULE_CACHE", str(tmp_path))
    monkeypatch.setattr(stored_merges, "LARGE", 1)
    stored.write_bytes(stored.read_bytes()[:-8])
    assert stored_merges.merges_of(vocabulary) == expected, "a damaged file is replaced"
    monkeypatch.setattr(stored_merges, "_derived", lambda *_: pytest.fail("the merges are read"))
    assert stored_merges.merges_of(vocabulary) == expected
    monkeypatch.undo()
    monkeypatch.setenv("FERRULE_CACHE", str(tmp_path))
    monkeypatch.setattr(stored_merges, "LARGE", 1)
    other = Vocabulary(Config({"tokenizer.ggml.scores": [0.0] * 8}, tmp_path), tokens, list(types), ids)
    assert stored_merges.merges_of(other) != expected
    assert len(list((tmp_path / "merges").iterdir())) == 2


def test_omitted_pairs_never_merge(tmp_path: Path) -> None:
    """Random pieces of two letters with many equal scores, against a list of all pairs."""
    draw = random.Random(20)
    for _ in range(200):
        longer = {"".join(draw.choices("ab", k=draw.randint(2, 6))) for _ in range(draw.randint(1, 30))}
        tokens = ["a", "b", *sorted(longer)]
        draw.shuffle(tokens)
        scores = [float(draw.randint(-4, 1)) for _ in tokens]
        ids = {token: index for index, token in enumerate(tokens)}
        config = Config({"tokenizer.ggml.scores": scores}, tmp_path / "x.gguf")
        merges = stored_merges.merges_of(Vocabulary(config, tokens, [TokenType.NORMAL] * len(tokens), ids))
        pairs = [
            (-scores[ids[piece]], -cut, cut - len(piece), ids[piece[:cut]], ids[piece[cut:]])
            for piece in tokens
            for cut in range(1, len(piece))
            if piece[:cut] in ids and piece[cut:] in ids
        ]
        every = [(tokens[first], tokens[second]) for *_, first, second in sorted(pairs)]
        assert [pair for pair in every if pair in set(merges)] == merges
        assert len({first + second for first, second in merges}) == len(merges)
        oracle, own = (tokenizers.Tokenizer(models.BPE(ids, each)) for each in (every, merges))
        for _ in range(50):
            text = "".join(draw.choices("ab", k=draw.randint(1, 40)))
            assert own.encode(text).ids == oracle.encode(text).ids, (tokens, scores, text)


def by_id(tokenizer: tokenizers.Tokenizer) -> list[str]:
    """Returns the tokens in the order of their ids."""
    ids = tokenizer.get_vocab()
    return sorted(ids, key=lambda token: ids[token])


@pytest.mark.parametrize("first_space", [True, False])
def test_sentencepiece_vocabulary(first_space: bool, tmp_path: Path) -> None:
    oracle, scores = sentencepiece_like(first_space=first_space)
    tokens = by_id(oracle)
    kinds = {**dict.fromkeys(tokens[3:259], TokenType.BYTE), "<unk>": TokenType.UNKNOWN}
    kinds |= {"<s>": TokenType.CONTROL, "</s>": TokenType.CONTROL, "<tool>": TokenType.USER_DEFINED}

    def fill(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types([kinds.get(token, TokenType.NORMAL) for token in tokens])
        writer.add_add_space_prefix(first_space)

    tokenizer = Tokenizer(write(tmp_path / "model.gguf", fill))
    samples = texts(["<s>", "</s>", "<tool>", "<unk>"])
    check_same(tokenizer, oracle, samples)
    assert tokenizer.encode("a")[0] == 1, "begins with <s> where the file does not say"
    for text in samples[:500]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if not any(token in text for token in ("<s>", "</s>", "<unk>", "<tool>", "▁")):
            assert tokenizer.decode(ids) == text


BYTE_LEVEL = sorted(name for name, rules in PRE_TOKENIZERS.items() if rules.byte_level)
"""Pre-tokenizers of models whose tokens spell bytes, so that every text has tokens."""


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_pre_tokenizers_round_trip(name: str, tmp_path: Path) -> None:
    def fill(writer: GGUFWriter) -> None:
        add_tokenizer(writer, TINY)
        writer.kv_data[0].pop("tokenizer.ggml.pre")
        writer.add_tokenizer_pre(name)

    tokenizer = Tokenizer(write(tmp_path / "model.gguf", fill))
    for text in texts(["x"], 300):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("gpt-2", "I'll pay 12345 dollars  now", ["I", "'ll", "Ġpay", "Ġ12345", "Ġdollars", "Ġ", "Ġnow"]),
        ("llama-bpe", "I'LL pay 12345\n\n x", ["I", "'LL", "Ġpay", "Ġ", "123", "45", "ĊĊ", "Ġx"]),
        ("qwen2", "it's 123 ok", ["it", "'s", "Ġ", "1", "2", "3", "Ġok"]),
        ("starcoder", "x = 42", ["x", "Ġ=", "Ġ", "4", "2"]),
        ("tekken", "helloWorld 12", ["hello", "World", "Ġ", "1", "2"]),
        ("gpt-4o", "Don't stop 1234", ["Don't", "Ġstop", "Ġ", "123", "4"]),
        ("deepseek-v3", "a1234+b", ["a", "123", "4", "+b"]),
        ("deepseek-llm", "ab 12\ncd", ["ab", "Ġ", "12", "Ċ", "cd"]),
        ("falcon", "a12345!!", ["a", "123", "45", "!!"]),
        # Punctuation of Unicode 8, whose U+166D is a symbol today and whose U+2E43 did not exist.
        ("falcon", "a \u166d \u2e43", ["a", "Ġ", "áĻŃ", "Ġâ¹ĥ"]),
        ("bloom", "one, two", ["one", ",", "Ġtwo"]),
        ("kimi-k2", "Hi你好World 1234", ["Hi", "ä½łå¥½", "World", "Ġ", "123", "4"]),
        ("qwen35", "cafe\u0301 12", ["cafeÌģ", "Ġ", "1", "2"]),
        ("tiny_aya", "x 1234567", ["x", "Ġ", "1", "234", "567"]),
        ("afmoe", "12 あ", ["12", "Ġ", "ãģĤ"]),
        ("minicpm5", "I'LL 12345", ["I", "'LL", "Ġ", "123", "45"]),
        ("ufakzeka", "Ali'nin it's", ["Ali", "'nin", "Ġit", "'s"]),
        ("laguna", "a\n\nb c", ["a", "ĊĊ", "b", "Ġc"]),
        ("bailingmoe2", "I'LL go\n\n", ["I", "'LL", "Ġgo", "ĊĊ"]),
        ("spark2_5", "1234!\n", ["1", "2", "3", "4", "!", "Ċ"]),
        ("chameleon", "a    b.", ["a", "ĠĠĠĠ", "b", "."]),
        ("superbpe", "a 1234567", ["a ".replace(" ", "Ġ"), "1", "234", "567"]),
        ("gemma4", "a b\n\nc", ["a b", "\n\n", "c"]),
        ("whitespace", " a  b\n", ["a", "b"]),
    ],
)
def test_pre_tokenizer_splits(name: str, text: str, pieces: list[str]) -> None:
    from ferrule._loading.gguf.pre_tokenizers import splitter

    assert [piece for piece, _ in splitter(PRE_TOKENIZERS[name]).pre_tokenize_str(text)] == pieces


def test_unknown_pre_tokenizer(tmp_path: Path) -> None:
    def fill(writer: GGUFWriter) -> None:
        add_tokenizer(writer, TINY)
        writer.kv_data[0].pop("tokenizer.ggml.pre")
        writer.add_tokenizer_pre("lama-bpe")

    with pytest.raises(
        UnsupportedModelError,
        match=r"model.gguf: tokenizer.ggml.pre must be one of llama-bpe, .*nearest first.*, got 'lama-bpe'",
    ):
        Tokenizer(write(tmp_path / "model.gguf", fill))


def test_tokenizer_model_implies_pre_tokenizer(tmp_path: Path) -> None:
    """Files of Gemma 4 have no `tokenizer.ggml.pre`; some say that texts have no BOS token, which is wrong."""
    oracle, _ = sentencepiece_like(first_space=False)
    oracle.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    described = json.loads(oracle.to_str())["model"]
    tokens = by_id(oracle)

    def fill(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list(tokens)
        writer.add_token_types(
            [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
            + [TokenType.BYTE] * 256
            + [TokenType.USER_DEFINED if token == "<tool>" else TokenType.NORMAL for token in tokens[259:]]
        )
        writer.add_token_merges([" ".join(pair) for pair in described["merges"]])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_bos_token(False)

    tokenizer = Tokenizer(write(tmp_path / "model.gguf", fill))
    samples = texts(["<s>", "</s>", "<unk>", "<tool>"], 2000)
    check_same(tokenizer, oracle, samples)
    assert tokenizer.encode("a")[0] == 1
    for text in samples[:500]:
        if not any(token in text for token in ("<s>", "</s>", "<unk>", "<tool>", "▁")):
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_whitespace_tokenizer(tmp_path: Path) -> None:
    def fill(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("whitespace")
        writer.add_tokenizer_pre("whitespace")
        writer.add_token_list(["<unk>", "a", "b", "ab"])
        writer.add_token_types([TokenType.UNKNOWN] + [TokenType.NORMAL] * 3)
        writer.add_token_merges(["a b"])
        writer.add_unk_token_id(0)

    tokenizer = Tokenizer(write(tmp_path / "model.gguf", fill))
    assert tokenizer.encode(" ab\n  a b", add_special_tokens=False) == [3, 1, 2]


PHI3 = ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|user|>", "<|end|>", "<|assistant|>"]


@pytest.mark.parametrize(
    ("architecture", "name", "strips"),
    [("phi3", "Phi 3.5 Mini Instruct", True), ("llama", "phi-3-mini", True), ("llama", "Mistral 7B", False)],
)
def test_phi3_special_tokens_strip_right_whitespace(architecture: str, name: str, strips: bool, tmp_path: Path) -> None:
    tokens = [*PHI3, *(f"<0x{byte:02X}>" for byte in range(256)), "H", "i", "Hi", "▁", "▁Hi"]
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, architecture)
    writer.add_name(name)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * (len(tokens) - 5) + [-3.0, -3.0, -1.0, -3.0, -2.0])
    writer.add_token_types(
        [TokenType.UNKNOWN] + [TokenType.CONTROL] * (len(PHI3) - 1) + [TokenType.BYTE] * 256 + [TokenType.NORMAL] * 5
    )
    writer.add_bos_token_id(1)
    tokenizer = Tokenizer(written(writer))
    ids = tokenizer.encode("<|user|>\nHi<|end|>\n<|assistant|>\n", add_special_tokens=False)
    if strips:
        assert [tokens[index] for index in ids] == ["<|user|>", "▁Hi", "<|end|>", "<|assistant|>"]
        assert len(tokenizer.encode("<|endoftext|>\n", add_special_tokens=False)) == 3, "a space and the line"
    else:
        assert len(ids) > 4


@pytest.mark.parametrize(
    ("architecture", "name", "pre", "mask"),
    [
        ("nomic-bert-moe", "Nomic", "gpt-2", "<mask>"),
        ("jina-bert-v2", "Jina", "jina-v2-de", "<mask>"),
        ("modern-bert", "ModernBERT base", "gpt-2", "[MASK]"),
    ],
)
def test_mask_tokens_strip_left_whitespace(architecture: str, name: str, pre: str, mask: str, tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", architecture)
    writer.add_name(name)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["a", "Ġ", mask, "aa"])
    writer.add_token_types([TokenType.NORMAL, TokenType.NORMAL, TokenType.CONTROL, TokenType.NORMAL])
    writer.add_token_merges(["a a"])
    tokenizer = Tokenizer(written(writer))
    assert tokenizer.encode(f"a  {mask} a", add_special_tokens=False) == [0, 2, 1, 0]


def test_added_tokens_are_text(tmp_path: Path) -> None:
    """DeepSeek's vocabularies add letters like ö, which GPT-2's alphabet has for a byte that UTF-8 never has."""

    def fill(writer: GGUFWriter) -> None:
        add_tokenizer(writer, TINY)
        lists = writer.kv_data[0]
        index = lists["tokenizer.ggml.tokens"].value.index("ö")
        lists["tokenizer.ggml.token_type"].value[index] = TokenType.USER_DEFINED

    tokenizer = Tokenizer(write(tmp_path / "model.gguf", fill))
    letter = tokenizer.vocabulary()["ö"]
    ids = tokenizer.encode("schön", add_special_tokens=False)
    assert letter in ids
    assert tokenizer.decode(ids) == "schön"
    assert tokenizer.token_bytes(letter + 1)[0][letter] == "ö".encode()


def test_end_token_of_normal_type_is_special(tmp_path: Path) -> None:
    """Aquila's file has `<|endoftext|>` among the normal tokens."""

    def fill(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(["<|endoftext|>", "a", "<", "aa"])
        writer.add_token_types([TokenType.NORMAL] * 4)
        writer.add_token_merges(["a a"])

    tokenizer = Tokenizer(write(tmp_path / "model.gguf", fill))
    ids = tokenizer.encode("a<|endoftext|>", add_special_tokens=False)
    assert ids == [1, 0]
    assert tokenizer.decode(ids) == "a"


@pytest.mark.parametrize("kind", [[[1], 1], [True, 1], [1, 7], ["x", 1]])
def test_invalid_token_type(kind: list[object]) -> None:
    values = {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.token_type": kind}
    with pytest.raises(
        TokenizerError, match=r"tokenizer\.ggml\.token_type\[[01]\] must be an integer from 0 to 6, got "
    ):
        read_vocabulary(Config(values, Path("model.gguf")))


def test_wordpiece_vocabulary(tmp_path: Path) -> None:
    own = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "sat", "."]

    def fill(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("bert")
        marked = [t if t.startswith("[") else t[2:] if t.startswith("##") else f"▁{t}" for t in own]
        writer.add_token_list(marked)
        writer.add_token_types([TokenType.CONTROL] * 5 + [TokenType.NORMAL] * 5)
        writer.add_unk_token_id(1)
        writer.add_uint32("tokenizer.ggml.cls_token_id", 2)
        writer.add_sep_token_id(3)

    tokenizer = Tokenizer(write(tmp_path / "model.gguf", fill))
    assert tokenizer.encode("The cats sat. dog") == [2, 5, 6, 7, 8, 9, 1, 3]
    assert tokenizer.encode_text("the", "cat") == ([2, 5, 3, 6, 3], [0, 0, 0, 1, 1])
    # BERT removes control characters except tab and line ends, which separate words like spaces.
    assert tokenizer.encode("the\tcat the\x0bcat", add_special_tokens=False) == [5, 6, 1]


def test_unigram_vocabulary(tmp_path: Path) -> None:
    pieces = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        ("▁", -3.0),
        ("▁the", -2.0),
        ("re", -2.5),
        ("r", -4.0),
        ("e", -4.0),
    ]

    def fill(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("t5")
        writer.add_token_list([piece for piece, _ in pieces])
        writer.add_token_scores([score for _, score in pieces])
        writer.add_token_types([TokenType.CONTROL, TokenType.CONTROL, TokenType.UNKNOWN] + [TokenType.NORMAL] * 5)
        writer.add_eos_token_id(1)
        writer.add_unk_token_id(2)

    tokenizer = Tokenizer(write(tmp_path / "model.gguf", fill))
    oracle = tokenizers.Tokenizer(models.Unigram(pieces, 2))
    # The pre-tokenizer of T5 and XLM-RoBERTa.
    oracle.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    for text in ("there the", "there\x85the", "the\x85", "\x85", " \x85 the \u3000\t there \n"):
        assert tokenizer.encode(text, add_special_tokens=False) == oracle.encode(text).ids
    assert tokenizer.encode("the") == [4, 1]

    def fill_with_a_trie_of_gigabytes(writer: GGUFWriter) -> None:
        fill(writer)
        writer.add_precompiled_charsmap(b"\xfc\xff\xff\xff\0\0\0\0")

    with pytest.raises(TokenizerError, match="precompiled_charsmap must begin with the bytes of its trie"):
        Tokenizer(write(tmp_path / "hostile.gguf", fill_with_a_trie_of_gigabytes))


@pytest.mark.parametrize("character", ["^", "a", " ", "0"])
@pytest.mark.parametrize("kind", ["gpt-2", "llama-bpe", "tekken", "gpt-4o", "sentencepiece"])
def test_million_repeated_characters_encode_in_time(kind: str, character: str, tmp_path: Path) -> None:
    """The limit is one second; the assertion allows for slow machines."""
    if kind == "sentencepiece":
        oracle, scores = sentencepiece_like(first_space=True)
        tokens = by_id(oracle)

        def fill(writer: GGUFWriter) -> None:
            writer.add_tokenizer_model("llama")
            writer.add_token_list(tokens)
            writer.add_token_scores(scores)
            writer.add_token_types(
                [TokenType.NORMAL] * 3 + [TokenType.BYTE] * 256 + [TokenType.NORMAL] * (len(tokens) - 259)
            )
            writer.add_unk_token_id(0)
    else:

        def fill(writer: GGUFWriter) -> None:
            add_tokenizer(writer, TINY)
            writer.kv_data[0].pop("tokenizer.ggml.pre")
            writer.add_tokenizer_pre(kind)

    tokenizer = Tokenizer(write(tmp_path / "model.gguf", fill))
    start = time.process_time()
    ids = tokenizer.encode(character * LONG, add_special_tokens=False)
    assert time.process_time() - start < 5
    assert tokenizer.decode(ids) == character * LONG
