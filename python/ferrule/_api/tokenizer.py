"""`PreTrainedTokenizer`: a model's tokenizer with the most used methods of Hugging Face's tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ferrule._text.tokenizer import Tokenizer
from ferrule.errors import InvalidParameterError


class PreTrainedTokenizer:
    """Tokenizer of a loaded model, as `LLM.get_tokenizer` returns it.

    Attributes such as `eos_token` and `bos_token` hold special tokens, `eos_token_id` and so on their ids.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        apply_chat_template: Callable[..., str],
    ) -> None:
        self._tokenizer = tokenizer
        self._apply_chat_template = apply_chat_template
        self._eos_token_ids = eos_token_ids
        self.vocab_size = vocab_size
        """Number of tokens of the model's vocabulary."""

    def __len__(self) -> int:
        """Returns the number of tokens of the model's vocabulary."""
        return self.vocab_size

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        """Returns `input_ids` and `attention_mask` of a text, or lists of them for several texts.

        Raises TokenizerError, PromptError.
        """
        single = isinstance(text, str)
        ids = [self.encode(each, add_special_tokens) for each in ([text] if single else text)]
        masks = [[1] * len(each) for each in ids]
        return {"input_ids": ids[0] if single else ids, "attention_mask": masks[0] if single else masks}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text.

        Raises TokenizerError, PromptError.
        """
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Returns the text of token ids.

        Raises TokenizerError.
        """
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        """Returns the text of each sequence of token ids.

        Raises TokenizerError.
        """
        return [self.decode(each, skip_special_tokens) for each in sequences]

    def get_vocab(self) -> dict[str, int]:
        """Returns the ids of all tokens, by token."""
        return self._tokenizer.vocabulary()

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Returns the id of a token, or a list of ids; None for an unknown token."""
        if isinstance(tokens, str):
            return self._tokenizer.token_id(tokens)
        return [self._tokenizer.token_id(token) for token in tokens]

    def apply_chat_template(  # noqa: PLR0917  # transformers' order
        self,
        conversation: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> Any:
        """Renders a conversation, or several, to token ids, or to text with `tokenize=False`.

        Raises ChatTemplateError, TokenizerError; InvalidParameterError for options that return tensors.
        """
        for name in ("return_tensors", "return_dict", "padding", "truncation", "max_length"):
            if variables.pop(name, None):
                raise InvalidParameterError(name, True, "left out; token ids are returned as lists")
        several = bool(conversation) and not isinstance(conversation[0], Mapping)
        rendered: list[Any] = []
        for messages in conversation if several else [conversation]:
            text = self._apply_chat_template(
                messages,
                tools=tools,
                documents=documents,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=variables or None,
            )
            rendered.append(self.encode(text, add_special_tokens=False) if tokenize else text)
        return rendered if several else rendered[0]

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token; None if the model has none."""
        named = self._tokenizer.special_tokens.get("eos_token")
        found = None if named is None else self._tokenizer.token_id(named)
        return next(iter(self._eos_token_ids), None) if found is None else found

    @property
    def chat_template(self) -> str | None:
        """Default chat template; None if the model has none."""
        return self._tokenizer.chat_templates.get("default")

    def __getattr__(self, name: str) -> Any:
        """Returns a special token such as `bos_token`, or its id, `bos_token_id`; None if the model has none."""
        role = name.removesuffix("_id")
        if not name.startswith("_") and role.endswith("_token"):
            token = self._tokenizer.special_tokens.get(role)
            return token if token is None or name == role else self._tokenizer.token_id(token)
        raise AttributeError(
            f"PreTrainedTokenizer has no attribute {name!r}; methods that need tensors are not supported"
        )
