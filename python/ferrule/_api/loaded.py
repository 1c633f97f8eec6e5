"""`LoadedModel`: loading, prompts and tokenization, which `LLM` and `AsyncLLM` share."""

from __future__ import annotations

import itertools
import json
import os
import random
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, Unpack

from ferrule._api.arguments import FOREIGN_START
from ferrule._api.foreign_methods import UNSUPPORTED, RefusingMeta
from ferrule._api.info import end_of_sequence, facts, implied_parsers, template_for_tools
from ferrule._api.tokenizer import PreTrainedTokenizer
from ferrule._engine.beams import BeamRequest, BeamSearchParams
from ferrule._engine.driver import Driver
from ferrule._engine.encoding import Encoding
from ferrule._engine.encoding.texts import TextReader
from ferrule._engine.lora import Adapters, LoRAAdapter
from ferrule._engine.metrics import EngineMetrics
from ferrule._engine.request import USUAL_REPORTS, Model, Reports, Request, check_vocabulary
from ferrule._loading import EMBEDDED, ModelFiles, find_model, read_model_files
from ferrule._loading.packed_cache import hold, release
from ferrule._loading.packing import weights_of
from ferrule._loading.shapes import find_shape
from ferrule._loading.verification import Verification
from ferrule._params.compatibility import compatible_call, refuse_attribute, refuse_unknown
from ferrule._params.declaration import parameters, signature_of
from ferrule._params.foreign_engine_args import FOREIGN as FOREIGN_ENGINE_ARGS
from ferrule._params.lora import LoRARequest
from ferrule._params.options import EngineArgs, EngineOptions
from ferrule._params.sampling import MAX_PRIORITY, MIN_PRIORITY, SamplingParams
from ferrule._pipeline.start import start_stages, uses_ray
from ferrule._text.chat.options import FOREIGN as FOREIGN_CHAT_OPTIONS
from ferrule._text.chat.options import ChatOptions
from ferrule._text.grammars import Grammars
from ferrule._text.prompt import ReadPrompt, TokensPrompt, check_token_ids, read_prompt
from ferrule._text.tokenizer import Tokenizer
from ferrule._validation import check_integer, shown
from ferrule._vision.model import PreparedImage, VisionModel
from ferrule._vision.processors import PROCESSORS
from ferrule._vision.prompt import expand
from ferrule.errors import ChatTemplateError, InvalidParameterError, ModelFileError, ModelNotFoundError

if TYPE_CHECKING:
    from ferrule import _native
    from ferrule._text.chat import ImageSource, Message, Tool
    from ferrule._text.parsers import MessageFormat
    from ferrule._text.parsers.families import ReasoningFamily, ToolCallFamily

AUTO = "auto"
"""Name of a parser that selects the one that the chat template implies."""


class LoadedModel(metaclass=RefusingMeta):
    """A model with its tokenizer and its engine."""

    _engine_args: ClassVar[type[EngineArgs]] = EngineArgs
    """Class of the constructor's arguments."""

    @signature_of(EngineArgs)
    def __init__(self, *given: Any, **options: Any) -> None:
        """Loads a model. The arguments are the fields of EngineArgs, which documents them.

        Raises ModelNotFoundError, ModelFileError, ConfigError, TokenizerError, InvalidParameterError,
        InsufficientMemoryError; PipelineStageError for a stage that fails while it loads, EngineError and
        MissingDependencyError for stages that Ray cannot start.
        """
        name = type(self).__name__
        if len(given) > 1:
            raise TypeError(f"{name}() takes one positional argument, the model, got {len(given)}; name the others")
        refuse_unknown(name, options, {*parameters(self._engine_args), *FOREIGN_ENGINE_ARGS})
        self._load(self._engine_args(*given, **options))

    @classmethod
    @compatible_call(FOREIGN_START)
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Loads the model that `engine_args` describes.

        Raises the errors of the constructor.
        """
        return cls(**engine_args.keywords())

    def _load(self, args: EngineArgs) -> None:
        model, progress = args.model, args.progress
        self._seeds = random.Random(args.seed)
        self._files = read_model_files(find_model(model, args.revision)).extended(args.max_model_len)
        self._options = args.for_packed(self._files.packed, self._files.path)
        self._tokenizer = Tokenizer(self._files.path if args.tokenizer is None else find_model(args.tokenizer))
        self._name = EMBEDDED if model is None else os.fspath(model)
        self._vision, packed_tower = self._vision_model(args)
        parts = [(self._files, self._name, self._options), *self._draft_model()]
        dummy = args.load_format == "dummy"
        if dummy:
            weights = [None for _ in parts]
        elif uses_ray(args):  # actors pack the weights on their hosts
            weights = [files.weights for files, _, _ in parts]
        else:
            weights = [weights_of(*part, progress) for part in parts]
        self._holds: list[weakref.finalize[..., Self]] = []
        try:
            engine = self._make_engine(parts, weights, progress)
        except ModelFileError:
            # Another process may have removed the packed file from the cache since `weights_of` returned it.
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
        packed.append(packed_tower)
        self._driver = Driver(engine, check_stages=self._check_stages)
        self._engine_info: dict[str, Any] = json.loads(self._driver.info())
        self._engine_info["packed_file"] = None if packed[0] is None else os.fspath(packed[0])
        wanted = args.max_model_len or self._files.spec.max_position_embeddings
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
        self._adapters.load_all(args.lora_modules)
        for path in filter(None, packed):
            hold(path)
        # With weights that exceed the memory, the two models would evict each other's pages.
        verified = [] if self._options.allow_paging else [path for path in packed if path is not None]
        self._verification = Verification(verified, self._driver.fail)
        self._verification.start()
        self._holds += [weakref.finalize(self, release, path) for path in filter(None, packed)]
        self._loaded()

    def _draft_model(self) -> list[tuple[ModelFiles, str, EngineOptions]]:
        """Returns files, name and options of the draft model; empty without one."""
        speculative = self._options.speculative
        if speculative is None or speculative.model is None:
            return []
        files = read_model_files(find_model(speculative.model, speculative.revision))
        options = self._options.for_draft_model(speculative.quantization).for_packed(files.packed, files.path)
        context = files.spec.max_position_embeddings
        if options.max_model_len is not None and options.max_model_len > context:
            options = replace(options, max_model_len=context)
        return [(files, speculative.model, options)]

    def _vision_model(self, args: EngineArgs) -> tuple[VisionModel | None, Path | None]:
        """Loads the part of the model that reads images; returns it, and its file of packed weights if it has one.

        A model reads text only without the configuration of images, and in several processes.
        """
        files = self._files
        if files.vision is None or args.load_format == "dummy" or args.workers > 1:
            return None, None
        try:
            processor = PROCESSORS[files.vision.model_type](files.path)
        except ModelNotFoundError as error:
            message = f"the model reads text only, because the configuration of its images is missing: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=4)
            return None, None
        from ferrule import _native

        tower, options = replace(files, spec=files.vision.tower), self._options.for_vision_tower()
        weights = weights_of(tower, self._name, options, None)
        engine = _native.Engine(tower.spec_json, os.fspath(weights), options.to_json())
        return VisionModel(processor, Driver(engine)), None if weights == files.path else weights

    def _make_engine(
        self,
        parts: Sequence[tuple[ModelFiles, str, EngineOptions]],
        weights: Sequence[Path | None],
        progress: Callable[[int, int], None] | None,
    ) -> _native.Engine:
        """Creates the engine of a model, with a draft model if there are two parts, and its pipeline stages."""
        from ferrule import _native

        stages = start_stages(self._options, parts[0][0], weights[0])
        workers = None
        self._check_stages = None if stages is None else stages.check
        if stages is not None:
            finalizer = weakref.finalize(self, stages.close)
            finalizer.atexit = False  # the stages end with this process, after the engine
            self._holds.append(finalizer)
            workers = [connection.fileno() for connection in stages.sockets], stages.ranks
            files, name, options = parts[0]
            parts = [(files, name, replace(options, threads=stages.threads)), *parts[1:]]

        model, *draft = [
            (files.spec_json, None if path is None else os.fspath(path), options.to_json())
            for path, (files, _, options) in zip(weights, parts, strict=True)
        ]
        try:
            return _native.Engine(*model, progress, *draft, stages=workers)
        except BaseException:
            if stages is not None:
                stages.close()
            raise

    def _loaded(self) -> None:
        """Runs once the engine exists; subclasses extend it."""

    @classmethod
    def from_shape(cls, name: str, **options: Any) -> Self:
        """Loads a model with random weights in a well-known shape, to measure speed without a download.

        The model has no tokenizer, so prompts are token ids. `ferrule bench --help` lists the names of the shapes.
        `options` are arguments of the constructor except `load_format`.

        Raises InvalidParameterError, InsufficientMemoryError.
        """
        return cls(find_shape(name), load_format="dummy", **options)

    @compatible_call(FOREIGN_CHAT_OPTIONS)
    def chat_prompt(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> TokensPrompt:
        """Renders a conversation to a prompt for `generate` and `stream`. `options` are the fields of ChatOptions.

        Messages have the form of OpenAI's API. Content is text or a list of parts, text and images, and arguments of
        tool calls are JSON or mappings; both are converted to the form that the template reads. Images are parts of
        OpenAI's, vLLM's or transformers' form, with a data URL, a PIL image, an array, bytes, or a local file. A
        model's reasoning is read from `reasoning_content`, `reasoning` or `thinking`. The template writes the special
        tokens. For a template that does not read `tools`, the system message describes them, with calls in the format
        of Hermes and Qwen.

        Raises ChatTemplateError, TokenizerError, PromptError for a long conversation that surely exceeds the context,
        ImageError for an invalid image, or for any image if the model reads text only.
        """
        text, sources = self._render(messages, options)
        images: list[PreparedImage] = []
        if self._vision is not None:
            given = ((each.value, each.field) for each in sources)
            images = self._vision.prepare(given, self._model.prompt_limit.tokens)
            text = expand(text, images, self._vision.processor)
        token_ids = self._tokenizer.encode(text, add_special_tokens=False, limit=self._model.prompt_limit)
        prompt: TokensPrompt = {"prompt": text, "prompt_token_ids": token_ids}
        return {**prompt, "multi_modal_data": {"image": images}} if images else prompt

    @compatible_call(FOREIGN_CHAT_OPTIONS)
    def apply_chat_template(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> str:
        """Returns the text of a conversation, with the special tokens and placeholders that the template writes.

        Raises ChatTemplateError, ImageError.
        """
        return self._render(messages, options)[0]

    def _render(self, messages: Sequence[Message], options: ChatOptions) -> tuple[str, list[ImageSource]]:
        """Returns the text of a conversation, and its images in the order of their placeholders."""
        for name in options:
            if name not in ChatOptions.__annotations__:
                raise TypeError(
                    f"unexpected keyword argument {name!r}; chat options are {', '.join(ChatOptions.__annotations__)}"
                )
        self._encoding.check_generates("answers")
        from ferrule._text.chat import adapt_messages, describe_tools, reads_tools, render_chat, take_images

        tools = options.get("tools")
        template = self._chat_template(options.get("chat_template"), tools)
        special_tokens = self._tokenizer.special_tokens
        texts, sources = take_images(messages, supported=self._vision is not None)
        adapted = adapt_messages(template, texts, special_tokens)
        if tools and not reads_tools(template):
            described = describe_tools(template, adapted, tools, special_tokens)
            adapted = adapt_messages(template, described, special_tokens)
        text = render_chat(
            template,
            adapted,
            special_tokens=special_tokens,
            tools=tools,
            documents=options.get("documents"),
            add_generation_prompt=options.get("add_generation_prompt", True),
            continue_final_message=options.get("continue_final_message", False),
            arguments=options.get("chat_template_kwargs"),
        )
        return text, sources

    @property
    def chat_templates(self) -> dict[str, str]:
        """Chat templates of the model by name; the one used without a name is `default`."""
        return dict(self._tokenizer.chat_templates)

    @property
    def generates(self) -> bool:
        """Whether the model generates text; other models embed or judge texts."""
        return self._files.spec.generates

    def message_format(
        self,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        chat_template: str | None = None,
        derive: bool = True,
    ) -> MessageFormat | None:
        """Returns the format of tool calls and reasoning for `generate` and `stream`; None if neither is parsed.

        `auto` selects the parser that is made for the chat template, or else the one that is derived from the template,
        if any; `template` always derives it. Tool calls are parsed only if there are `tools`, with `hermes` if the
        template does not read tools (see `chat_prompt`). `derive=False` keeps `auto` from deriving parsers, which
        renders the template about ten times, such as for a template of an untrusted client.

        Raises InvalidParameterError; ChatTemplateError for a function without a schema.
        """
        from ferrule._text.derivation import derive_format
        from ferrule._text.parsers import DERIVED, MessageFormat

        templates = self._tokenizer.chat_templates
        if chat_template is not None:
            templates = {"default": templates.get(chat_template, chat_template)}
        calls: str | ToolCallFamily | None = tool_call_parser if tools or tool_call_parser != AUTO else None
        reasoning: str | ReasoningFamily | None = reasoning_parser
        if AUTO in (calls, reasoning):
            special_tokens = self._tokenizer.special_tokens
            implied = implied_parsers(templates, self._files.spec.architecture, special_tokens, derive=derive)
            calls = implied.calls if calls == AUTO else calls
            reasoning = implied.reasoning if reasoning == AUTO else reasoning
        if DERIVED in (calls, reasoning):
            derived = derive_format(template_for_tools(templates) or "", self._tokenizer.special_tokens)
            calls = derived.required_calls() if calls == DERIVED else calls
            reasoning = derived.required_reasoning() if reasoning == DERIVED else reasoning
        if calls is None and reasoning is None:
            return None
        if tools is None:
            return MessageFormat(calls, reasoning)
        from ferrule._text.chat import tool_schemas

        return MessageFormat(calls, reasoning, tools=tool_schemas(tools))

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text.

        Raises TokenizerError, PromptError.
        """
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    @property
    def first_token_ids(self) -> list[int]:
        """Special tokens that `tokenize` adds before a text, such as a beginning-of-sequence token.

        Raises TokenizerError.
        """
        return list(self._tokenizer.first_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids. Ids in the vocabulary that the tokenizer does not have become empty text.

        Raises TokenizerError, PromptError.
        """
        ids = check_token_ids(token_ids, self._model.vocab_size, may_be_empty=True)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Returns the text of a single token, special tokens included; U+FFFD if it is part of a character."""
        return self._tokenizer.token_text(check_token_ids([token_id], self._model.vocab_size)[0])

    def token_bytes(self, token_id: int) -> bytes | None:
        """Returns the bytes of a single token; None without a tokenizer, or if they depend on adjacent tokens.

        Raises PromptError.
        """
        return self._tokenizer.text_bytes(check_token_ids([token_id], self._model.vocab_size)[0])

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the default parameters of `generate`: values of generation_config.json, else of SamplingParams."""
        defaults = self._files.defaults
        return replace(defaults.completed(defaults), max_tokens=defaults.max_tokens or SamplingParams().max_tokens)

    @property
    def generation_config(self) -> SamplingParams:
        """Parameters that the model's generation_config.json sets; a field that it could set and does not is None."""
        return self._files.defaults

    def get_tokenizer(self) -> PreTrainedTokenizer:
        """Returns the tokenizer, with the most used methods of Hugging Face's tokenizers."""
        return PreTrainedTokenizer(
            self._tokenizer, self._model.vocab_size, self._model.eos_token_ids, self.apply_chat_template
        )

    def info(self) -> dict[str, Any]:
        """Returns facts about the loaded model: sizes, formats, bytes of memory, limits, instruction set, threads."""
        found = facts(self._name, self._files, self._tokenizer, self._engine_info)
        speculative = self._options.speculative
        return {
            **found,
            **self._engine_info,
            "speculative_config": None if speculative is None else asdict(speculative),
        }

    def lora_adapters(self) -> list[LoRAAdapter]:
        """Returns the loaded low-rank adapters, the oldest first."""
        return self._adapters.all()

    def metrics(self) -> EngineMetrics:
        """Returns counters and gauges of the engine, without waiting for a running step.

        Raises EngineError once the engine is closed.
        """
        return EngineMetrics.from_json(self._driver.metrics())

    def close(self) -> None:
        """Closes the engine and frees weights and cache. Running calls in other threads get an EngineError."""
        self._driver.close()
        self._release()

    def _release(self) -> None:
        """Frees what is loaded beside the engine; called when it is closed."""
        if self._vision is not None:
            self._vision.close()
        self._verification.stop()
        self._adapters.close()
        for release_hold in self._holds:
            release_hold()

    if not TYPE_CHECKING:  # type checkers report unknown attributes themselves

        def __getattr__(self, name: str) -> NoReturn:
            """Raises an AttributeError that says what to use instead of a method of vLLM's."""
            refuse_attribute(self, name, UNSUPPORTED)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _portion(self) -> tuple[int, int]:
        """Maximum number of tokens and of texts to encode before other requests run: as many as one step computes."""
        return int(self._engine_info["max_num_batched_tokens"]), int(self._engine_info["max_num_seqs"])

    def _make_encoding(self) -> Encoding:
        """Creates the object that makes plans for the pooling tasks of this model."""
        sentence, spec = self._files.sentence, self._files.spec
        limit, limited_by = self._model.max_model_len, self._model.limited_by
        # An explicit max_model_len takes precedence over the model's files.
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
            limit=model.prompt_limit,
            vision=self._vision,
        )

    def _request(
        self,
        prompt: object,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: object = 0,
        prompt_logprobs_from: int = 1,
        reports: Reports = USUAL_REPORTS,
        message_format: object = None,
        lora_request: object = None,
    ) -> Request:
        self._encoding.check_generates("text")
        check_vocabulary(params, self._model.vocab_size)
        priority = check_integer("priority", priority, MIN_PRIORITY, MAX_PRIORITY)
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
            reports=reports,
            message_format=_checked_format(message_format),
            lora=lora,
            lora_request=lora_request if isinstance(lora_request, LoRARequest) else None,
            grammar=self._grammars.compile(params.structured_outputs),
        )

    def _beam_request(
        self,
        prompt: object,
        search: BeamSearchParams,
        *,
        request_id: str | None = None,
        priority: object = 0,
        message_format: object = None,
        lora_request: object = None,
    ) -> BeamRequest:
        self._encoding.check_generates("text")
        params = search.sampling()
        check_vocabulary(params, self._model.vocab_size)
        priority = check_integer("priority", priority, MIN_PRIORITY, MAX_PRIORITY)
        return BeamRequest(
            str(next(self._request_numbers)) if request_id is None else request_id,
            self._read_prompt(prompt),
            search,
            params.completed(self._files.defaults),
            self._model,
            priority=priority,
            message_format=_checked_format(message_format),
            lora=self._adapters.find(lora_request),
            lora_request=lora_request if isinstance(lora_request, LoRARequest) else None,
        )

    def _chat_template(self, chosen: object, tools: object) -> str:
        """Returns a given template, the model's template of a given name, or the default one for the tools."""
        templates = self._tokenizer.chat_templates
        names = ", ".join(sorted(templates)) or "none"
        if chosen is None:
            chosen = "tool_use" if tools is not None and "tool_use" in templates else "default"
            if chosen not in templates:
                raise ChatTemplateError(
                    f"the model has no default chat template (looked in {self._files.path}: chat_template.jinja, "
                    "tokenizer_config.json, and tokenizer.chat_template of a GGUF file; "
                    f"named templates: {names}); pass chat_template"
                )
        if not isinstance(chosen, str):
            raise ChatTemplateError(f"chat_template must be a template or the name of a template, got {shown(chosen)}")
        if chosen not in templates and "{" not in chosen:
            raise ChatTemplateError(
                f"chat_template must be a template or one of the model's names ({names}), got {shown(chosen)}"
            )
        return templates.get(chosen, chosen)


def _checked_format(message_format: object) -> MessageFormat | None:
    from ferrule._text.parsers import MessageFormat

    if message_format is None or isinstance(message_format, MessageFormat):
        return message_format
    raise InvalidParameterError("message_format", message_format, "a MessageFormat")


def only_params(params: object) -> SamplingParams:
    """Returns the SamplingParams of one request.

    Raises InvalidParameterError.
    """
    if not isinstance(params, SamplingParams):
        raise InvalidParameterError("sampling_params", params, "a SamplingParams")
    return params


def stream_params(params: object) -> SamplingParams:
    """Returns the SamplingParams of a stream, which has one completion.

    Raises InvalidParameterError.
    """
    checked = only_params(params)
    for name, count in (("n", checked.n), ("best_of", checked.best_of or 1)):
        if count != 1:
            raise InvalidParameterError(name, count, "1: a stream has one completion")
    return checked


def beam_params(params: object) -> BeamSearchParams:
    """Returns the parameters of a beam search.

    Raises InvalidParameterError.
    """
    if not isinstance(params, BeamSearchParams):
        raise InvalidParameterError("params", params, "a BeamSearchParams")
    return params
