"""Builds the training text of the tiny model: Python's standard library, and dialogues and stories from templates.

The order of the random draws is part of the recipe: the same interpreter gives the same text, byte for byte.
"""

import argparse
import glob
import json
import sys
import sysconfig
from pathlib import Path
from random import Random

from facts import (
    ADJECTIVES,
    ANIMALS,
    CAPITALS,
    COLORS,
    FEELINGS,
    KNOWLEDGE,
    NAMES,
    OBJECTS,
    OPPOSITES,
    PLACES,
    UNCOUNTABLE,
)

SEED = 20261120
HELDOUT_CHAT_SEED = 999
HELDOUT_CHATS = 400
HELDOUT_FILES = 30
HELDOUT_CHARACTERS = 400_000
# Characters of templates for each character of code.
TEMPLATE_RATIO = 0.45

# Parts of the standard library's paths that are left out: tests, character tables and help texts.
LEFT_OUT = ("/test", "site-packages", "lib2to3/tests", "encodings/", "pydoc_data")


class Templates:
    """Dialogues, stories and single facts, drawn at random."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def story(self) -> str:
        """A short story of two animals."""
        choice = self.random.choice
        name, animal, adjective, place, thing, friend, feeling = (
            choice(words) for words in (NAMES, ANIMALS, ADJECTIVES, PLACES, OBJECTS, NAMES, FEELINGS)
        )
        other = choice([x for x in ANIMALS if x != animal])
        elsewhere = choice([x for x in PLACES if x != place])
        middle = choice(
            [
                f'One day, {name} found a {thing} near the {elsewhere}. "What a nice {thing}!" said {name}.',
                f"One morning, {name} lost a {thing} in the {elsewhere}. "
                f"{name} looked everywhere, but the {thing} was gone.",
                f"Every day, {name} walked to the {elsewhere} to look for a {thing}.",
            ]
        )
        meeting = choice(
            [
                f'Then {name} met a {other} named {friend}. "Can I help you?" asked {friend}.',
                f'There, a {other} named {friend} was waiting. "Will you play with me?" asked {friend}.',
            ]
        )
        end = choice(
            [
                f"They played together until the sun went down, and {name} was very {feeling}.",
                f"Together they found the {thing}, and both of them were {feeling}.",
                f"{name} gave the {thing} to {friend}, and they became good friends.",
                f"They shared the {thing} and went home to the {place}. {name} felt {feeling}.",
            ]
        )
        beginning = f"Once upon a time, there was a {adjective} {animal} named {name} who lived in a {place}."
        return f"{beginning} {middle} {meeting} {end}"

    def code(self) -> tuple[str, str]:
        """A small programming task and its solution."""
        choice = self.random.choice
        total, a, b = choice(["total", "result", "value", "count", "answer"]), choice("abxyn"), choice("ckmz")
        return choice(
            [
                ("Write a function that adds two numbers.", f"def add({a}, {b}):\n    return {a} + {b}"),
                ("Write a function that returns the square of a number.", f"def square({a}):\n    return {a} * {a}"),
                ("Write a function that reverses a string.", "def reverse(text):\n    return text[::-1]"),
                (
                    "Write a function that sums a list.",
                    f"def sum_list(items):\n    {total} = 0\n    for item in items:\n"
                    f"        {total} += item\n    return {total}",
                ),
                (
                    "Write a function that finds the largest item.",
                    "def largest(items):\n    best = items[0]\n    for item in items:\n"
                    "        if item > best:\n            best = item\n    return best",
                ),
                (
                    "Write a function that computes the factorial of n.",
                    "def factorial(n):\n    if n < 2:\n        return 1\n    return n * factorial(n - 1)",
                ),
                (
                    "Write a function that computes Fibonacci numbers.",
                    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
                ),
                (
                    "Write a function that counts the words in a text.",
                    "def count_words(text):\n    return len(text.split())",
                ),
                ("Write a function that checks if a number is even.", f"def is_even({a}):\n    return {a} % 2 == 0"),
                ("Write a loop that prints the numbers from 1 to 10.", "for i in range(1, 11):\n    print(i)"),
            ]
        )

    def capital(self) -> tuple[str, str]:
        """A question about a capital."""
        country, city = self.random.choice(CAPITALS)
        return self.random.choice(
            [
                (f"What is the capital of {country}?", f"The capital of {country} is {city}."),
                (f"Name the capital of {country}.", f"The capital of {country} is {city}."),
                (f"Which country has the capital {city}?", f"{city} is the capital of {country}."),
                (f"Where is {city}?", f"{city} is in {country}. It is the capital of {country}."),
                (f"capital of {country}", f"{city}"),
                (f"Tell me about {city}.", f"{city} is the capital of {country}."),
            ]
        )

    def arithmetic(self) -> tuple[str, str]:
        """A small sum, difference or product."""
        a, b = self.random.randint(0, 20), self.random.randint(0, 20)
        c, d = a % 11, b % 11
        return self.random.choice(
            [
                (f"What is {a} + {b}?", f"{a} + {b} = {a + b}"),
                (f"What is {a + b} - {b}?", f"{a + b} - {b} = {a}"),
                (f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."),
                (f"What is {c} * {d}?", f"{c} * {d} = {c * d}"),
            ]
        )

    def opposite(self) -> tuple[str, str]:
        """A question about opposites."""
        words = list(self.random.choice(OPPOSITES))
        self.random.shuffle(words)
        question = self.random.choice([f"What is the opposite of {words[0]}?", f"Give me the opposite of {words[0]}."])
        return question, f"The opposite of {words[0]} is {words[1]}."

    def color(self) -> tuple[str, str]:
        """A question about the color of a thing."""
        thing, color = self.random.choice(COLORS)
        article = "an " if thing[0] in "aeiou" else "a "
        return f"What color is {'' if thing in UNCOUNTABLE else article}{thing}?", f"It is {color}."

    def counting(self) -> tuple[str, str]:
        """A request to count."""
        first = self.random.randint(1, 5)
        last = first + self.random.randint(3, 10)
        return f"Count from {first} to {last}.", ", ".join(map(str, range(first, last + 1))) + "."

    def storytelling(self) -> tuple[str, str]:
        """A request for a story."""
        requests = ["Tell me a story.", "Tell me a short story.", "Please tell me a story about a friend."]
        return self.random.choice(requests), self.story()

    def turn(self) -> tuple[str, str]:
        """One question and its answer."""
        kinds = (
            (0.30, self.capital),
            (0.45, self.arithmetic),
            (0.60, lambda: self.random.choice(KNOWLEDGE)),
            (0.68, self.opposite),
            (0.74, self.color),
            (0.80, self.counting),
            (0.90, self.code),
            (1.00, self.storytelling),
        )
        drawn = self.random.random()
        return next(kind for limit, kind in kinds if drawn < limit)()

    def chat(self) -> str:
        """A dialogue of one to three turns, in the form of the chat template."""
        text = ""
        if self.random.random() < 0.3:
            text += "<|system|>You are a helpful assistant.<|end|>\n"
        for _ in range(self.random.choice([1, 1, 2, 3])):
            question, answer = self.turn()
            text += f"<|user|>{question}<|end|>\n<|assistant|>{answer}<|end|>\n"
        return text

    def plain(self) -> str:
        """A sentence, a story or an explanation outside of any dialogue."""
        drawn = self.random.random()
        if drawn < 0.45:
            country, city = self.random.choice(CAPITALS)
            return self.random.choice(
                [
                    f"The capital of {country} is {city}.",
                    f"{city} is the capital of {country}.",
                    f"The capital city of {country} is {city}.",
                ]
            )
        if drawn < 0.85:
            return self.story()
        return self.random.choice(KNOWLEDGE)[1]

    def document(self) -> str:
        """A dialogue, or plain text."""
        return self.chat() if self.random.random() < 0.65 else self.plain()


def source_files(library: Path) -> list[str]:
    """Returns the files of the standard library that are included, as sorted paths relative to it."""
    # Not Path.rglob, which would find hidden files too.
    found = glob.glob("**/*.py", root_dir=library, recursive=True)  # noqa: PTH207
    return sorted(path for path in found if not any(part in f"/{path}" for part in LEFT_OUT))


def read_ascii(path: Path) -> str:
    """Returns a file's text, or an empty text if it is not ASCII."""
    text = path.read_text(encoding="utf8", errors="ignore")
    return text if text.isascii() else ""


def build(library: Path, out: Path) -> None:
    """Writes corpus.json, heldout_code.txt and heldout_chat.txt to `out`."""
    random = Random(SEED)
    templates = Templates(random)
    files = source_files(library)
    random.shuffle(files)
    texts = [read_ascii(library / path) for path in files]
    held_out = "".join(texts[:HELDOUT_FILES])[:HELDOUT_CHARACTERS]
    code = [text for text in texts[HELDOUT_FILES:] if text]

    code_characters = sum(map(len, code))
    synthetic: list[str] = []
    characters = 0
    while characters < code_characters * TEMPLATE_RATIO:
        synthetic.append(templates.document())
        characters += len(synthetic[-1])

    out.mkdir(parents=True, exist_ok=True)
    (out / "corpus.json").write_text(json.dumps({"code": code, "syn": synthetic}))
    (out / "heldout_code.txt").write_text(held_out)
    held_out_templates = Templates(Random(HELDOUT_CHAT_SEED))
    (out / "heldout_chat.txt").write_text("".join(held_out_templates.chat() for _ in range(HELDOUT_CHATS)))
    print(f"{len(code)} files of {code_characters} characters; {len(synthetic)} texts of {characters} characters")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="the folder to write to")
    parser.add_argument(
        "--library",
        type=Path,
        default=Path(sysconfig.get_path("stdlib")),
        help="a standard library; the published model saw that of Python 3.11 (default: this interpreter's)",
    )
    arguments = parser.parse_args()
    build(arguments.library, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
