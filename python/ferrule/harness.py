"""ferrule as a model of lm-evaluation-harness: `import ferrule.harness` registers it there as `ferrule`.

    import lm_eval
    from ferrule.harness import FerruleLM

    lm_eval.simple_evaluate(FerruleLM("path/to/model", quantization="int8"), tasks=["arc_easy"])

`ferrule eval MODEL --tasks arc_easy` does the same on the command line. Prompts that are too long are truncated on the
left with a warning, as in the harness's own models.
"""
# lm-evaluation-harness is an optional dependency and only partially typed.
# pyright: reportMissingImports=false, reportMissingTypeStubs=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false, reportUnknownParameterType=false, reportCallIssue=false

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ferrule._api.llm import LLM
from ferrule._params.sampling import SamplingParams
from ferrule._text.prompt import TokensPrompt
from ferrule.errors import ChatTemplateError, InvalidParameterError, MissingDependencyError, PromptError

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm
except ImportError as error:
    raise MissingDependencyError("tasks require lm-evaluation-harness: pip install 'ferrule[eval]'") from error

logger = logging.getLogger(__name__)

MAX_GEN_TOKS = 256
"""Number of tokens to generate for a task that sets no limit; the default of the harness's own models."""
PORTION = 256
"""Number of requests per engine call: more than any batch holds, and few enough for a smooth progress bar."""
TOKEN_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names under which a task may limit the tokens to generate; the first one that is set applies."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Sampling parameters that tasks may set, besides `seed`."""

Scored: TypeAlias = tuple[tuple[str, str] | None, list[int], list[int]]
"""A log-likelihood request: texts of context and continuation, the key in the harness's cache, and the ids of both."""


class FerruleLM(TemplateLM):
    """A model for lm-evaluation-harness, which computes log-likelihoods and generates continuations."""

    def __init__(
        self,
        pretrained: LLM | str | os.PathLike[str] | None = None,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        batch_size: object = None,
        max_batch_size: object = None,
        device: object = None,
        **options: Any,
    ) -> None:
        """Wraps a loaded LLM, or loads a model.

        `pretrained` is an LLM or the name of a model, which is loaded with `options`, the arguments of `LLM`.
        `chat_template` is a template or the name of one of the model's templates, for tasks that run as conversations.
        The harness passes batch sizes and a device to every model; they have no effect, since the engine forms batches.

        Raises the errors of `LLM`.
        """
        super().__init__()
        self.llm = pretrained if isinstance(pretrained, LLM) else LLM(pretrained, **options)
        self._chat_template = chat_template
        self._chat_template_kwargs = dict(chat_template_kwargs or {})
        info = self.llm.info()
        self._name: str = info["model"]
        self._eos: list[int] = info["eos_token_ids"]
        self._max_model_len = int(info["max_model_len"])
        self._first = self.llm.first_token_ids

    @property
    def eot_token_id(self) -> int:
        """Returns the end-of-text token.

        Raises PromptError for a model without such a token.
        """
        if not self._eos:
            raise PromptError(f"the context must not be empty: {self._name} has no end-of-sequence token to begin with")
        return self._eos[0]

    @property
    def prefix_token_id(self) -> int:
        """Returns the token that precedes a text without context."""
        return self._first[0] if self._first else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """Returns the name of the tokenizer, which the harness uses in the names of its caches."""
        return self._name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_unused: Any) -> list[int]:
        """Returns the token ids of a text, preceded by the tokenizer's first special tokens.

        They are not added to a text that begins with them. Special tokens at the end are never added, since a
        continuation follows.
        """
        if add_special_tokens is None:
            add_special_tokens = not self._begins(string)
        ids = self.llm.tokenize(string, add_special_tokens=False)
        return [*self._first, *ids] if add_special_tokens else ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Renders a conversation as text; without `add_generation_prompt` the last message is continued.

        If the template refuses system messages, they are left out.
        """
        try:
            return self._render(chat_history, add_generation_prompt)
        except ChatTemplateError:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            logger.warning("the chat template refuses system messages; the system message was left out")
            return self._render(others, add_generation_prompt)

    def chat_template(self, chat_template: bool | str | None = False) -> str | None:
        """Returns the chat template for the harness's records; None if tasks do not run as conversations."""
        if chat_template is False or chat_template is None:
            return None
        templates = self.llm.chat_templates
        chosen = self._chat_template or (chat_template if isinstance(chat_template, str) else "default")
        return templates.get(chosen, chosen)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Computes the log-probability of whole texts; texts longer than the context are split into windows."""
        windows: list[Scored] = []
        counts: list[int] = []
        for (text,) in (request.args for request in requests):
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._max_model_len - 2,  # room for one token of context and one generated token
                context_len=1,
            )
            before = len(windows)
            windows.extend((None, *make_disjoint_window(pair)) for pair in pairs)
            counts.append(len(windows) - before)
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        totals = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, **_unused: Any
    ) -> list[tuple[float, bool]]:
        answers: list[tuple[float, bool]] = []
        with tqdm(total=len(requests), desc="log-likelihoods", disable=disable_tqdm) as bar:
            for begin in range(0, len(requests), PORTION):
                portion = requests[begin : begin + PORTION]
                contexts = [self._cut(context, len(continuation) + 1) for _, context, continuation in portion]
                prompts: list[TokensPrompt] = [{"prompt_token_ids": context} for context in contexts]
                scores = self.llm.loglikelihood(prompts, [continuation for _, _, continuation in portion])
                for (texts, _, _), score in zip(portion, scores, strict=True):
                    answer = (score.logprob, score.is_greedy)
                    answers.append(answer)
                    if texts is not None:
                        self.cache_hook.add_partial("loglikelihood", texts, answer)
                bar.update(len(portion))
        return answers

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generates continuations up to a stop string, an end-of-sequence token, or the maximum number of tokens."""
        answers: list[str] = []
        with tqdm(total=len(requests), desc="continuations", disable=disable_tqdm) as bar:
            for begin in range(0, len(requests), PORTION):
                portion = [request.args for request in requests[begin : begin + PORTION]]
                params = [generation_params(kwargs) for _, kwargs in portion]
                prompts: list[TokensPrompt] = [
                    {"prompt_token_ids": self._cut(self.tok_encode(context), each.max_tokens or 0)}
                    for (context, _), each in zip(portion, params, strict=True)
                ]
                outputs = self.llm.generate(prompts, params, use_tqdm=False)
                for arguments, output in zip(portion, outputs, strict=True):
                    answers.append(output.outputs[0].text)
                    self.cache_hook.add_partial("generate_until", arguments, answers[-1])
                bar.update(len(portion))
        return answers

    def _cut(self, context: list[int], following: int) -> list[int]:
        """Truncates a context on the left, so that `following` tokens fit after it.

        Raises PromptError if no token of the context would remain.
        """
        room = self._max_model_len - following
        if room < 1:
            limit = f"max_model_len ({self._max_model_len})"
            raise PromptError(f"a continuation must have fewer than {limit} tokens, got {following}")
        if len(context) > room:
            logger.warning(
                "a context of %d tokens was truncated to its last %d, so that %d more tokens fit",
                len(context),
                room,
                following,
            )
        return context[-room:]

    def _begins(self, text: str) -> bool:
        """Whether a text begins with the special token that would be added, as the output of chat templates may."""
        return bool(self._first) and self.llm.tokenize(text[:64], add_special_tokens=False)[:1] == self._first[:1]

    def _render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        return self.llm.apply_chat_template(
            messages,
            chat_template=self._chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            chat_template_kwargs=self._chat_template_kwargs,
        )


register_model("ferrule")(FerruleLM)


def generation_params(kwargs: Mapping[str, Any]) -> SamplingParams:
    """Converts `generation_kwargs` of a task to sampling parameters; the default is greedy.

    Raises InvalidParameterError for unknown parameters.
    """
    left = dict(kwargs)
    stop = left.pop("until", None) or []
    limits = [left.pop(name) for name in TOKEN_LIMITS if name in left]
    sampled = left.pop("do_sample", None)
    chosen = {name: left.pop(name) for name in (*SAMPLING, "seed") if name in left}
    if left:
        raise InvalidParameterError("generation_kwargs", left, "generation parameters that ferrule supports")
    # Without do_sample, a temperature above 0 selects sampling.
    if sampled is False or (sampled is None and not chosen.get("temperature")):
        chosen["temperature"] = 0.0
    several: list[str] = [stop] if isinstance(stop, str) else list(stop)
    return SamplingParams.with_model_defaults(
        max_tokens=limits[0] if limits else MAX_GEN_TOKS, stop=[each for each in several if each], **chosen
    )


def run_tasks(
    model: FerruleLM,
    names: Sequence[str],
    *,
    num_fewshot: int | None = None,
    include_path: str | None = None,
    chat: bool = False,
    limit: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Runs tasks or groups of tasks; returns the `shots`, the `metrics` and their standard `errors` of each.

    `include_path` is a directory with further tasks, which take precedence over the harness's tasks of the same name.
    `limit` is the maximum number of examples of each task.

    Raises InvalidParameterError for an unknown task, and the errors of the harness for data that it cannot load.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include_path)
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown or not names:
        raise InvalidParameterError("tasks", unknown or [], "names that `lm_eval ls tasks` lists")
    results: Any = simple_evaluate(
        model,
        tasks=list(names),
        num_fewshot=num_fewshot,
        limit=limit,
        apply_chat_template=chat,
        task_manager=manager,
        log_samples=False,
    )
    shots: Mapping[str, Any] = results["n-shot"]
    return {name: _figures(figures, shots.get(name)) for name, figures in results["results"].items()}


def _figures(results: Mapping[str, Any], shots: object) -> dict[str, Any]:
    """Splits figures such as `acc,none` and `acc_stderr,none` into metrics and errors; omits other values."""
    metrics: dict[str, float] = {}
    errors: dict[str, float] = {}
    for key, value in results.items():
        metric, _, chosen_filter = key.partition(",")
        if "," not in key or isinstance(value, (bool, str)) or not isinstance(value, (int, float)):
            continue
        name = metric.removesuffix("_stderr") + ("" if chosen_filter == "none" else f", {chosen_filter}")
        (errors if metric.endswith("_stderr") else metrics)[name] = float(value)
    return {"shots": shots, "metrics": metrics, "errors": errors}
