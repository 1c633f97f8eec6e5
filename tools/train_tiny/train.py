"""Trains the tiny Llama-shaped model on the CPU with PyTorch; saves a Hugging Face directory."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 1
SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
PAD, BOS, EOS, END = 0, 1, 2, 6

# Number of texts of each kind that the tokenizer is trained on.
TOKENIZER_CODE_TEXTS = 500
TOKENIZER_SYNTHETIC_TEXTS = 30_000

WINDOW = 256
"""Tokens that one training example predicts."""
BATCH = 16
SYNTHETIC_SHARE = 0.4
"""Fraction of synthetic examples in a batch."""

PEAK_LEARNING_RATE = 3e-3
WARM_UP_STEPS = 100
DECAY_FROM = 0.6
"""Fraction of the training time after which the learning rate decays."""
FLOOR = 0.02
"""Final learning rate as a fraction of the maximum."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

Tokens = NDArray[np.uint16]


@dataclass(frozen=True)
class Shape:
    """The model's dimensions; the defaults are those of ferrule's embedded model."""

    hidden: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 768
    vocabulary: int = 4096


@dataclass(frozen=True)
class Corpus:
    """The token streams that examples are cut from."""

    code: Tokens
    synthetic: Tokens

    def batch(self, random: Random) -> torch.Tensor:
        """Windows at random places, `[BATCH, WINDOW + 1]`."""
        windows: list[NDArray[np.int64]] = []
        for _ in range(BATCH):
            source = self.synthetic if random.random() < SYNTHETIC_SHARE else self.code
            begin = random.randrange(len(source) - WINDOW - 1)
            windows.append(source[begin : begin + WINDOW + 1].astype(np.int64))
        return torch.from_numpy(np.stack(windows))


def load_tokenizer(path: Path, vocabulary: int, texts: Sequence[str]) -> Tokenizer:
    """The byte-level BPE tokenizer at `path`, trained first if the file does not exist."""
    if not path.exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.save(str(path))
    return Tokenizer.from_file(str(path))


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tokens:
    """Encodes all texts as one stream of tokens, each between bos and eos."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        ids += [BOS, *encoding.ids, EOS]
    return np.array(ids, np.uint16)


def new_model(shape: Shape) -> LlamaForCausalLM:
    """Creates the model with random initial weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            intermediate_size=shape.ffn,
            max_position_embeddings=2048,
            rope_theta=10000.0,
            rms_norm_eps=1e-5,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=PAD,
            tie_word_embeddings=True,
        )
    )


def new_optimizer(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    """Creates AdamW with weight decay only on matrices."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, done: float) -> float:
    """Linear warm-up by steps, then flat, then linear decay; `done` is the fraction of the time that has passed."""
    warm_up = min(1, (step + 1) / WARM_UP_STEPS)
    decay = 1 if done < DECAY_FROM else max(FLOOR, (1 - done) / (1 - DECAY_FROM))
    return PEAK_LEARNING_RATE * warm_up * decay


def train(model: LlamaForCausalLM, corpus: Corpus, random: Random, minutes: float, checkpoint: Path) -> None:
    """Trains for the given number of minutes; saves checkpoints periodically."""
    optimizer = new_optimizer(model)
    begun = time.time()
    step = 0
    average: float | None = None
    while (elapsed := time.time() - begun) < minutes * 60:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, elapsed / (minutes * 60))
        batch = corpus.batch(random)
        logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        average = loss.item() if average is None else 0.98 * average + 0.02 * loss.item()
        if step % 50 == 0:
            speed = step * BATCH * WINDOW / elapsed
            print(f"step {step}: loss {average:.3f}, {elapsed:.0f} s, {speed:.0f} tokens/s", flush=True)
        if step % 500 == 0:
            model.save_pretrained(checkpoint)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Writes weights (bf16), tokenizer, chat template and generation defaults."""
    model.eval().bfloat16().save_pretrained(out)
    roles = {"bos_token": SPECIAL_TOKENS[BOS], "eos_token": SPECIAL_TOKENS[EOS], "pad_token": SPECIAL_TOKENS[PAD]}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles)
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(out)
    generation = {"bos_token_id": BOS, "eos_token_id": [EOS, END], "pad_token_id": PAD}
    (out / "generation_config.json").write_text(json.dumps(generation))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("corpus", type=Path, help="the folder that corpus.py wrote")
    parser.add_argument("out", type=Path, help="the folder of the model")
    parser.add_argument("--minutes", type=float, default=70.0)
    parser.add_argument("--threads", type=int, default=2)
    for name, default in vars(Shape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    arguments = parser.parse_args()
    shape = Shape(**{name: getattr(arguments, name) for name in vars(Shape())})

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(SEED)
    random = Random(SEED)
    texts: dict[str, list[str]] = json.loads((arguments.corpus / "corpus.json").read_text())
    code, synthetic = texts["code"], texts["syn"]
    tokenizer = load_tokenizer(
        arguments.corpus / f"tokenizer-{shape.vocabulary}.json",
        shape.vocabulary,
        code[:TOKENIZER_CODE_TEXTS] + synthetic[:TOKENIZER_SYNTHETIC_TEXTS],
    )
    random.shuffle(synthetic)
    corpus = Corpus(encode(tokenizer, code), encode(tokenizer, synthetic))
    model = new_model(shape)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters} parameters; tokens: {len(corpus.code)} of code, {len(corpus.synthetic)} of templates")
    train(model, corpus, random, arguments.minutes, arguments.out.with_name(arguments.out.name + "-checkpoint"))
    save(model, tokenizer, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
