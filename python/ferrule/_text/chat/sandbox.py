"""Environment of templates: transformers' dialect of Jinja with bounded time and memory.

Jinja's sandbox restricts attribute access, but not time or memory. In this environment, every loop, call, operator,
filter and output spends units of a Budget before it runs, including a bound on the size of its result. Filters and
methods whose cost has no simple bound are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, wraps
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from ferrule._text.chat.budget import BUDGET, ITEM, MAX_BITS, READ, STEP, breadth
from ferrule._text.chat.counting import HOOKS, counted
from ferrule._text.chat.functions import FUNCTIONS, tojson
from ferrule._text.chat.growth import FILTER_GROWTH, METHOD_GROWTH, SLOW, TEST_GROWTH, Growth, formatted
from ferrule.errors import ChatTemplateError

UNBOUNDED_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
"""Removed filters; they take more than linear time and are meant for web pages."""
CONSTANT_FILTERS = ("count", "d", "default", "first", "last", "length", "random")
"""Operations that do not read the items of their operands."""
LAZY_FILTERS = ("batch", "map", "reject", "rejectattr", "select", "selectattr", "slice")
"""Filters that are generators and read each item once."""
EAGER_FILTERS = ("groupby", "join", "max", "min", "sort", "sum", "tojson", "unique")
"""Filters that read all items of their operand, which may be a generator."""
CONSTANT_TESTS = (
    *("boolean", "callable", "defined", "escaped", "false", "float", "integer", "iterable", "mapping", "none"),
    *("number", "sameas", "sequence", "string", "true", "undefined"),
)
METHODS: dict[type, tuple[str, ...]] = {
    str: (
        *("capitalize", "casefold", "center", "count", "endswith", "find", "format", "format_map", "index", "isalnum"),
        *("isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable"),
        *("isspace", "istitle", "isupper", "join", "ljust", "lower", "lstrip", "partition", "removeprefix"),
        *("removesuffix", "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split"),
        *("splitlines", "startswith", "strip", "swapcase", "title", "upper", "zfill"),
    ),
    list: ("copy", "count", "index"),
    tuple: ("count", "index"),
    dict: ("copy", "get", "items", "keys", "values"),
    int: ("bit_length",),
    float: ("is_integer",),
    bytes: (),
    range: (),
}
"""Methods that templates may call on values; none of them modifies a value. Jinja's own objects keep their
attributes."""
_FREE = (jinja2.runtime.Macro, jinja2.runtime.LoopContext, jinja2.runtime.BlockReference)
"""Functions that spend their units themselves."""
_HIDDEN = ("_block_vars", "_loop_vars", "caller")
"""Keyword arguments that Jinja adds to calls."""


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja environment that spends units of BUDGET, which must be set during rendering."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        # The optimizer is disabled, since its constant folding would not be counted.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[GenerationBlock, jinja2.ext.loopcontrols],
        )
        functions = cast("dict[str, object]", self.globals)
        del functions["lipsum"]
        functions.update(FUNCTIONS)
        filters = cast("dict[str, Callable[..., Any]]", self.filters)
        tests = cast("dict[str, Callable[..., Any]]", self.tests)
        for name in UNBOUNDED_FILTERS:
            del filters[name]
        filters["tojson"] = tojson
        for name in filters.keys() - CONSTANT_FILTERS:
            filters[name] = _bounded(name, filters[name], FILTER_GROWTH.get(name))
        for name in tests.keys() - CONSTANT_TESTS:
            tests[name] = _bounded(name, tests[name], TEST_GROWTH.get(name))
        filters.update(HOOKS)

    def _generate(
        self, source: jinja2.nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        return super()._generate(counted(source), name, filename, defer_init)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Returns an item or attribute; filters that follow a path call it too."""
        BUDGET.get().spend(STEP)
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        """Allows Jinja's safe attributes, restricted to METHODS."""
        if not super().is_safe_attribute(obj, attr, value):
            return False
        allowed = next((names for kind, names in METHODS.items() if isinstance(obj, kind)), None)
        return allowed is None or attr in allowed or not callable(value)

    def wrap_str_format(self, value: object) -> Callable[..., str] | None:
        """Wraps `str.format` and `str.format_map` with a bound."""
        function = super().wrap_str_format(value)
        text = getattr(value, "__self__", None)
        if function is None or not isinstance(text, str):
            return None

        def bounded(*args: object, **kwargs: object) -> str:
            budget = BUDGET.get()
            budget.require(formatted(text, budget.read(args, kwargs)))
            return function(*args, **kwargs)

        return bounded

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Runs an operator whose result may be much larger than its operands."""
        budget = BUDGET.get()
        if isinstance(left, int) and isinstance(right, int):
            bits, more = left.bit_length(), right.bit_length()
            if (operator == "*" and bits + more > MAX_BITS) or (operator == "**" and bits * right > MAX_BITS):
                raise ChatTemplateError(f"the chat template computes an integer of more than {MAX_BITS} bits")
        elif operator == "*":
            times = left if isinstance(left, int) else right
            budget.require((breadth(left) + breadth(right)) * (times if isinstance(times, int) else 1))
        elif operator == "%" and isinstance(left, str):
            budget.require(formatted(left, budget.read(right)))
        else:
            budget.require(breadth(left) + breadth(right))
        result = super().call_binop(context, operator, left, right)
        budget.made(result)
        # Markup, a subclass of str whose operators escape, is excluded.
        return budget.temporary(result, len(result)) if operator == "+" and type(result) is str else result

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Runs a call."""
        budget = BUDGET.get()
        budget.spend(ITEM)
        function, call = __obj, super().call
        if isinstance(function, _FREE):
            return call(__context, function, *args, **kwargs)
        owner: object = getattr(function, "__self__", None)
        operands = (*args, *(value for key, value in kwargs.items() if key not in _HIDDEN))
        if isinstance(owner, str):
            name = str(getattr(function, "__name__", ""))
            args = tuple(_materialized(arg) for arg in args)
            growth = METHOD_GROWTH.get(name)
            budget.require(0 if growth is None else growth(owner, args))
            budget.spend(_slowness(name, owner, operands))
        if isinstance(owner, (str, list, tuple)):
            operands = (cast("object", owner), *operands)
        budget.read(*operands)
        result = call(__context, function, *args, **kwargs)
        budget.made(result)
        return result


class GenerationBlock(jinja2.ext.Extension):
    """Extension of `{% generation %}`, which marks the assistant's text for training; it renders its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's signature

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Parses the block as a call of its content."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


def _bounded(name: str, function: Callable[..., Any], growth: Growth | None) -> Callable[..., Any]:
    """Wraps a filter or test so that it spends its bound first; arguments that jinja2 adds are passed on."""
    passed = int(hasattr(function, "jinja_pass_arg"))

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = BUDGET.get()
        context, value, more = args[:passed], args[passed], args[passed + 1 :]
        size = budget.read(*more, *kwargs.values())
        if name in LAZY_FILTERS:
            # Empty and undefined values have no items.
            value = budget.counted(value, STEP + size.units // READ) if value else value
        else:
            value = _materialized(value) if name in EAGER_FILTERS else value
            budget.spend(breadth(value) // ITEM * (size.units // READ) + _slowness(name, value, more))
            size += budget.read(value)
        budget.require(0 if growth is None else growth(value, size, more, kwargs))
        result = function(*context, value, *more, **kwargs)
        budget.made(result)
        return result

    return bounded


def _materialized(value: object) -> object:
    """Returns a generator's values as a list, and other values unchanged."""
    if not isinstance(value, (Iterator, range)):
        return value
    values = list(cast("Iterator[object]", value))
    BUDGET.get().made(values)
    return values


def _slowness(name: str, text: object, operands: tuple[object, ...]) -> int:
    """Returns the units of a search that may compare all characters of two strings."""
    if name not in SLOW or not isinstance(text, str):
        return 0
    return len(text) * sum(len(each) for each in operands if isinstance(each, str)) // READ


@lru_cache(maxsize=1)
def environment() -> Environment:
    """Returns the environment of the process, whose only state is the cache of compiled templates."""
    return Environment()
