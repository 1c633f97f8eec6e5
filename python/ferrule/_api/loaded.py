"""A model in this process: what `LLM` and `AsyncLLM` have in common, before anything runs."""

from __future__ import annotations

import itertools
import json
import os
import random
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ferrule._api.info import end_of_sequence, facts
from ferrule._engine.beams import BeamRequest, BeamSearchParams
from ferrule._engine.driver import Driver
from ferrule._engine.encoding import Encoding
from ferrule._engine.encoding.texts import TextReader
from ferrule._engine.lora import Adapters, LoRAAdapter
from ferrule._engine.metrics import EngineMetrics
from ferrule._engine.request import Model, Request, check_vocabulary
from ferrule._loading import EMBEDDED, ModelFiles, find_model, read_model_files
from ferrule._loading.packed_cache import hold, release
from ferrule._loading.packing import weights_of
from ferrule._loading.shapes import find_shape
from ferrule._params.options import EngineOptions, check_load_format
from ferrule._params.sampling import MAX_PRIORITY, MIN_PRIORITY, SamplingParams
from ferrule._text.grammars import Grammars
from ferrule._text.prompt import ReadPrompt, TokensPrompt, check_token_ids, read_prompt
from ferrule._text.tokenizer import Tokenizer
from ferrule._validation import check_whole, shown
from ferrule.errors import ChatTemplateError, InvalidParameterError, ModelFileError

if TYPE_CHECKING:
    from ferrule import _native
    from ferrule._text.chat import Message, Tool
    from ferrule._text.parsers import MessageFormat

AUTO = "auto"
"""The parser that the chat template tells."""


class LoadedModel:
    """A model, its tokenizer and its engine, and what can be asked of them without a request."""

    _max_queued_requests: ClassVar[int | None] = None
    """What a `max_queued_requests` of None means."""

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        quantization: str = "auto",
        mmap: bool = True,
        allow_paging: bool = False,
        packed_cache_limit: int | None = None,
        threads: int | None = None,
        max_model_len: int | None = None,
        kv_cache_dtype: str = "auto",
        kv_cache_memory: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        prefix_cache_dir: str | os.PathLike[str] | None = None,
        prefix_cache_dir_limit: int | None = None,
        max_queued_requests: int | None = None,
        target_itl: float | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        revision: str | None = None,
        load_format: str = "auto",
        seed: int | None = None,
        lora_modules: Mapping[str, str | os.PathLike[str]] | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Loads a model.

        `model` is a directory, a GGUF file, `org/repo` on the Hugging Face hub (`revision` a branch, tag or commit of
        it; `org/repo:Q4_K_M` its GGUF file of that quantization), or nothing for the small model that ships with
        ferrule. `tokenizer` is another directory, file or repository to take the tokenizer from. `load_format="dummy"`
        makes random weights instead of reading any. `seed` makes the seeds that requests draw repeatable.
        `lora_modules` names low-rank adapters with their paths, for requests to ask for; more can be loaded later.
        `speculative_config` is vLLM's, a mapping with the fields of SpeculativeConfig. The
        other arguments are those of EngineOptions, where they are explained; an AsyncLLM takes 1024 for
        `max_queued_requests` where it is not given. `progress` is called with the bytes of weights loaded so far and in
        all.

        Raises ModelNotFoundError, ModelFileError, ConfigError, TokenizerError, InvalidParameterError,
        InsufficientMemoryError.
        """
        options = EngineOptions(
            quantization=quantization,
            mmap=mmap,
            allow_paging=allow_paging,
            packed_cache_limit=packed_cache_limit,
            threads=threads,
            max_model_len=max_model_len,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_memory=kv_cache_memory,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            prefix_cache_dir=prefix_cache_dir,
            prefix_cache_dir_limit=prefix_cache_dir_limit,
            max_queued_requests=self._max_queued_requests if max_queued_requests is None else max_queued_requests,
            target_itl=target_itl,
            speculative_config=speculative_config,
        )
        check_load_format(load_format)
        self._seeds = random.Random(None if seed is None else check_whole("seed", seed, 0, 2**64 - 1))
        self._files = read_model_files(find_model(model, revision))
        self._options = options.of_packed(self._files.packed, self._files.path)
        self._tokenizer = Tokenizer(self._files.path if tokenizer is None else find_model(tokenizer))
        self._name = EMBEDDED if model is None else os.fspath(model)
        parts = [(self._files, self._name, self._options), *self._draft_model()]
        dummy = load_format == "dummy"
        weights = [None if dummy else weights_of(*part, progress) for part in parts]
        try:
            engine = self._make_engine(parts, weights, progress)
        except ModelFileError:
            # Another process may have removed one from the cache meanwhile.
            there = [
                path if path is None or path.exists() else files.weights
                for path, (files, _, _) in zip(weights, parts, strict=True)
            ]
            if there == weights:
                raise
            weights = there
            engine = self._make_engine(parts, weights, progress)
        packed = [
            None if path in (None, files.path) else path for path, (files, _, _) in zip(weights, parts, strict=True)
        ]
        self._driver = Driver(engine)
        self._engine_info: dict[str, Any] = json.loads(self._driver.info())
        self._engine_info["packed_file"] = None if packed[0] is None else os.fspath(packed[0])
        wanted = max_model_len or self._files.spec.max_position_embeddings
        held = int(self._engine_info["max_model_len"])
        self._model = Model(
            tokenizer=self._tokenizer,
            vocab_size=self._files.spec.vocab_size,
            max_model_len=held,
            limited_by="max_model_len" if held >= wanted else "the key-value cache (kv_cache_memory)",
            eos_token_ids=end_of_sequence(self._files, self._tokenizer),
        )
        self._encoding = self._make_encoding()
        self._request_numbers = itertools.count()
        self._grammars = Grammars(self._tokenizer, self._model.vocab_size)
        self._adapters = Adapters(self._driver)
        self._adapters.load_all(lora_modules)
        for path in filter(None, packed):
            hold(path)
        self._held = [weakref.finalize(self, release, path) for path in filter(None, packed)]
        self._loaded()

    def _draft_model(self) -> list[tuple[ModelFiles, str, EngineOptions]]:
        """The files, the name and the options of the model that guesses; nothing if there is none."""
        speculative = self._options.speculative
        if speculative is None or speculative.model is None:
            return []
        files = read_model_files(find_model(speculative.model, speculative.revision))
        options = self._options.of_draft_model(speculative.quantization).of_packed(files.packed, files.path)
        context = files.spec.max_position_embeddings
        if options.max_model_len is not None and options.max_model_len > context:
            options = replace(options, max_model_len=context)
        return [(files, speculative.model, options)]

    @staticmethod
    def _make_engine(
        parts: Sequence[tuple[ModelFiles, str, EngineOptions]],
        weights: Sequence[Path | None],
        progress: Callable[[int, int], None] | None,
    ) -> _native.Engine:
        """The engine of a model, and of one that guesses for it if there are two, with the files of their weights."""
        from ferrule import _native

        model, *draft = [
            (files.spec.to_json(), None if path is None else os.fspath(path), options.to_json())
            for path, (files, _, options) in zip(weights, parts, strict=True)
        ]
        return _native.Engine(*model, progress, *draft)

    def _loaded(self) -> None:
        """What a subclass adds once the engine is there."""

    @classmethod
    def from_shape(cls, name: str, **options: Any) -> Self:
        """A model of random numbers in a well-known shape, to measure speed without a download; feed it token ids.

        `name` is one of those that `ferrule bench --help` lists; `options` are those of the class, without
        `load_format`.

        Raises InvalidParameterError, InsufficientMemoryError.
        """
        return cls(find_shape(name), load_format="dummy", **options)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        tools: Sequence[Tool] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> TokensPrompt:
        """A conversation as the prompt that `generate` and `stream` take.

        `chat_template` is a template or the name of one of the model's; without it, the one named `tool_use` serves
        where there are tools, else `default`. The template itself writes the special tokens.
        `continue_final_message`, with `add_generation_prompt=False`, lets the model go on with the last message: at the
        end of its content, or of the field so named, such as `reasoning_content`. `tools` are JSON schemas, or
        functions whose type hints and docstring say what a schema would. `chat_template_kwargs` are further variables
        of the template, such as `enable_thinking`.

        Messages are as OpenAI's API has them: content is text or a list of parts of text, and arguments of tool calls
        are JSON or maps; each template gets what it can read. A model's reasoning is read from `reasoning_content`,
        `reasoning` or `thinking`.

        Raises ChatTemplateError, TokenizerError.
        """
        text = self.apply_chat_template(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            chat_template_kwargs=chat_template_kwargs,
        )
        return {"prompt_token_ids": self._tokenizer.encode(text, add_special_tokens=False)}

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        tools: Sequence[Tool] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of `chat_prompt`, special tokens as the template writes them.

        Raises ChatTemplateError.
        """
        self._encoding.check_generates("answers")
        from ferrule._text.chat import adapt_messages, render_chat

        template = self._chat_template(chat_template, tools)
        special_tokens = self._tokenizer.special_tokens
        return render_chat(
            template,
            adapt_messages(template, messages, special_tokens),
            special_tokens=special_tokens,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            arguments=chat_template_kwargs,
        )

    @property
    def chat_templates(self) -> dict[str, str]:
        """The model's chat templates by name; the usual one is `default`."""
        return dict(self._tokenizer.chat_templates)

    def message_format(
        self,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        chat_template: str | None = None,
    ) -> MessageFormat | None:
        """How the model writes tool calls and reasoning, for `generate` and `stream`; None where neither is parsed.

        `ferrule serve --help` lists the parsers' names. `auto` takes the parser that the chat template implies, if
        any; for tool calls only if there are `tools`.

        Raises InvalidParameterError, ChatTemplateError for a function that has no schema.
        """
        from ferrule._text.parsers import MessageFormat, reasoning_parser_for, tool_call_parser_for

        templates = self._tokenizer.chat_templates
        chosen = "\n".join(templates.values()) if chat_template is None else templates.get(chat_template, chat_template)
        model_type = self._files.spec.architecture
        if tool_call_parser == AUTO:
            tool_call_parser = tool_call_parser_for(chosen, model_type) if tools else None
        if reasoning_parser == AUTO:
            reasoning_parser = reasoning_parser_for(chosen, model_type)
        if tool_call_parser is None and reasoning_parser is None:
            return None
        if tools is None:
            return MessageFormat(tool_call_parser, reasoning_parser)
        from ferrule._text.chat import tool_schemas

        return MessageFormat(tool_call_parser, reasoning_parser, tools=tool_schemas(tools))

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text.

        Raises TokenizerError, PromptError.
        """
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    @property
    def first_token_ids(self) -> list[int]:
        """What `tokenize` puts before a text, such as a beginning-of-sequence token.

        Raises TokenizerError.
        """
        return list(self._tokenizer.first_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids. An id of the vocabulary for which the tokenizer has no token is empty text.

        Raises TokenizerError, PromptError.
        """
        ids = check_token_ids(token_ids, self._model.vocab_size, may_be_empty=True)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text of a single token, special or not; U+FFFD where it is part of a character."""
        return self._tokenizer.token_text(check_token_ids([token_id], self._model.vocab_size)[0])

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes of a single token's text; None without a tokenizer, or where they depend on its neighbours.

        Raises PromptError.
        """
        return self._tokenizer.text_bytes(check_token_ids([token_id], self._model.vocab_size)[0])

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends; None in fields that it leaves open."""
        return self._files.defaults

    def info(self) -> dict[str, Any]:
        """What is loaded and how: the model's sizes, formats, bytes and limits, and the machine's part in it."""
        said = facts(self._name, self._files, self._tokenizer, self._engine_info["quantization"])
        speculative = self._options.speculative
        return {**said, **self._engine_info, "speculative_config": None if speculative is None else asdict(speculative)}

    def lora_adapters(self) -> list[LoRAAdapter]:
        """The low-rank adapters that requests may ask for, the oldest first."""
        return self._adapters.all()

    def metrics(self) -> EngineMetrics:
        """What the engine has done and what it holds. Never waits for a running step.

        Raises EngineError once the engine is closed.
        """
        return EngineMetrics.from_json(self._driver.metrics())

    def close(self) -> None:
        """Frees weights and cache. A call that still runs in another thread gets an EngineError."""
        self._driver.close()
        self._adapters.close()
        for let_go in self._held:
            let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _portion(self) -> tuple[int, int]:
        """Tokens and texts that are encoded before others have their turn: as many as a step computes."""
        return int(self._engine_info["max_num_batched_tokens"]), int(self._engine_info["max_num_seqs"])

    def _make_encoding(self) -> Encoding:
        """How texts are embedded, classified and ranked by this model."""
        sentence, spec = self._files.sentence, self._files.spec
        limit, limited_by = self._model.max_model_len, self._model.limited_by
        # Who gives max_model_len knows better than the files.
        if sentence.max_tokens is not None and self._options.max_model_len is None and sentence.max_tokens < limit:
            limit, limited_by = sentence.max_tokens, "max_seq_length of sentence_bert_config.json"
        reader = TextReader(
            self._tokenizer,
            vocab_size=spec.vocab_size,
            token_types=max(spec.embedding.token_types, 1),
            limit=limit,
            limited_by=limited_by,
            lower_case=sentence.lower_case,
        )
        return Encoding(self._files, reader, self._name)

    def _read_prompt(self, prompt: object) -> ReadPrompt:
        model = self._model
        return read_prompt(
            prompt,
            self._tokenizer,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            limited_by=model.limited_by,
        )

    def _request(
        self,
        prompt: object,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: object = 0,
        prompt_logprobs_from: int = 1,
        message_format: object = None,
        lora_request: object = None,
    ) -> Request:
        self._encoding.check_generates("text")
        check_vocabulary(params, self._model.vocab_size)
        priority = check_whole("priority", priority, MIN_PRIORITY, MAX_PRIORITY)
        read = self._read_prompt(prompt)
        lora = self._adapters.find(lora_request)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        return Request(
            str(next(self._request_numbers)) if request_id is None else request_id,
            read,
            params.completed(self._files.defaults),
            seed,
            self._model,
            priority=priority,
            prompt_logprobs_from=prompt_logprobs_from,
            message_format=_checked_format(message_format),
            lora=lora,
            grammar=self._grammars.compile(params.structured_outputs),
        )

    def _beam_request(
        self,
        prompt: object,
        search: BeamSearchParams,
        *,
        request_id: str | None = None,
        priority: object = 0,
        lora_request: object = None,
    ) -> BeamRequest:
        self._encoding.check_generates("text")
        params = search.sampling()
        check_vocabulary(params, self._model.vocab_size)
        priority = check_whole("priority", priority, MIN_PRIORITY, MAX_PRIORITY)
        return BeamRequest(
            str(next(self._request_numbers)) if request_id is None else request_id,
            self._read_prompt(prompt),
            search,
            params.completed(self._files.defaults),
            self._model,
            priority=priority,
            lora=self._adapters.find(lora_request),
        )

    def _chat_template(self, chosen: object, tools: object) -> str:
        """A template by its name, or by itself; without either the model's own, for tools if there are any."""
        templates = self._tokenizer.chat_templates
        names = ", ".join(sorted(templates)) or "none"
        if chosen is None:
            chosen = "tool_use" if tools is not None and "tool_use" in templates else "default"
            if chosen not in templates:
                raise ChatTemplateError(
                    f"the model has no chat template named default ({self._files.path}: neither "
                    "chat_template.jinja nor tokenizer_config.json, nor a GGUF's tokenizer.chat_template; "
                    f"named templates: {names}); give chat_template"
                )
        if not isinstance(chosen, str):
            raise ChatTemplateError(f"chat_template is {shown(chosen)}; it must be a template or the name of one")
        if chosen not in templates and "{" not in chosen:
            raise ChatTemplateError(
                f"chat_template is {shown(chosen)}; that is no template, and the model's have the names: {names}"
            )
        return templates.get(chosen, chosen)


def _checked_format(message_format: object) -> MessageFormat | None:
    from ferrule._text.parsers import MessageFormat

    if message_format is None or isinstance(message_format, MessageFormat):
        return message_format
    raise InvalidParameterError(f"message_format is {shown(message_format)}; it must be a MessageFormat")


def only_params(params: object) -> SamplingParams:
    """The SamplingParams of one request; None stands for the defaults.

    Raises InvalidParameterError.
    """
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise InvalidParameterError(f"sampling_params is {shown(params)}; it must be a SamplingParams")
    return params


def stream_params(params: object) -> SamplingParams:
    """As `only_params`, with one completion alone.

    Raises InvalidParameterError.
    """
    checked = only_params(params)
    for name, count in (("n", checked.n), ("best_of", checked.best_of or 1)):
        if count != 1:
            raise InvalidParameterError(f"{name} is {count}; a stream has one completion: the limit is 1")
    return checked


def beam_params(params: object) -> BeamSearchParams:
    """The parameters of a beam search.

    Raises InvalidParameterError.
    """
    if not isinstance(params, BeamSearchParams):
        raise InvalidParameterError(f"params is {shown(params)}; it must be a BeamSearchParams")
    return params
