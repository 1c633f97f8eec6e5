"""The environment that templates run in: transformers' dialect of Jinja, every step of it counted.

Jinja's sandbox keeps templates from what is not theirs; it does not keep them from looping for hours or from filling
the memory. Here every loop, call, operator, filter and piece of output spends from a Budget first. What a filter or a
method makes of its operands is bounded before it runs; those whose cost has no simple bound are not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
from jinja2.visitor import NodeTransformer

from ferrule.chat.budget import BUDGET, ITEM, MAX_BITS, Size, breadth
from ferrule.chat.functions import FUNCTIONS, tojson
from ferrule.chat.growth import FILTER_GROWTH, METHOD_GROWTH, SLOW, formatted
from ferrule.errors import ChatTemplateError

STEP = 4
"""Units of a node of a template's syntax tree, each time that the code around it runs."""

UNBOUNDED_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
"""Their time is more than linear in what they get. They make web pages, not prompts."""
CONSTANT_FILTERS = ("attr", "count", "d", "default", "first", "last", "length", "random")
"""They look at nothing but the outside of their operands."""
LAZY_FILTERS = ("batch", "map", "reject", "rejectattr", "select", "selectattr", "slice")
"""Generators: they work while someone else takes from them, and look at each item once."""
EAGER_FILTERS = ("groupby", "join", "max", "min", "sort", "sum", "unique")
"""They look into all that they get, which may be what a generator yields."""
CONSTANT_TESTS = frozenset(
    "boolean callable defined escaped even false filter float integer iterable mapping none number odd sameas sequence "
    "string test true undefined".split()
)
METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        "capitalize casefold center count endswith find format index isalnum isalpha isascii isdecimal isdigit "
        "isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition "
        "removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith "
        "strip swapcase title upper zfill".split()
    ),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    int: frozenset(("bit_length",)),
    float: frozenset(("is_integer",)),
    bytes: frozenset(),
    range: frozenset(),
}
"""What may be called on values; none of it changes them. Other objects of templates have Jinja's own attributes."""
_FREE = (jinja2.runtime.Macro, jinja2.runtime.LoopContext, jinja2.runtime.BlockReference)
"""What spends in its own body when it is called."""
_HIDDEN = ("_block_vars", "_loop_vars", "caller")
"""Arguments that Jinja adds to calls."""

_Result = TypeVar("_Result")


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Renders only while BUDGET is set."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        # Without the optimizer: what it folds when it compiles, nobody has counted.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[GenerationBlock, jinja2.ext.loopcontrols],
        )
        functions = cast("dict[str, object]", self.globals)
        del functions["lipsum"]
        functions.update(FUNCTIONS)
        self.filters["tojson"] = tojson
        for name in UNBOUNDED_FILTERS:
            del self.filters[name]
        for name, function in self.filters.items():
            if name not in CONSTANT_FILTERS:
                self.filters[name] = _counted_filter(name, function)
        for name, function in self.tests.items():
            if name not in CONSTANT_TESTS:
                self.tests[name] = _counted(function)
        self.filters.update({_SPEND: _spend, _STEP: _step, _READ: _read, _WRITE: _write, _MADE: _made})

    def _generate(
        self, source: jinja2.nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        return super()._generate(_Counting().visit(source), name, filename, defer_init)

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        """Jinja's own answer, narrowed to METHODS."""
        allowed = next((names for kind, names in METHODS.items() if isinstance(obj, kind)), None)
        return super().is_safe_attribute(obj, attr, value) and (allowed is None or attr in allowed)

    def wrap_str_format(self, value: object) -> Callable[..., str] | None:
        """`str.format`, bounded."""
        function = super().wrap_str_format(value)
        text = getattr(value, "__self__", None)
        if function is None or not isinstance(text, str):
            return None

        def bounded(*args: object, **kwargs: object) -> str:
            budget = BUDGET.get()
            budget.require(formatted(text, budget.read(args, kwargs), (*args, *kwargs.values())))
            return function(*args, **kwargs)

        return bounded

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """An operator whose result may be much larger than its operands."""
        budget = BUDGET.get()
        if isinstance(left, int) and isinstance(right, int):
            bits, more = left.bit_length(), right.bit_length()
            if (operator == "*" and bits + more > MAX_BITS) or (operator == "**" and bits * right > MAX_BITS):
                raise ChatTemplateError(f"the chat template makes a number of more than {MAX_BITS} bits, the limit")
        elif operator == "*":
            times = left if isinstance(left, int) else right
            budget.require((breadth(left) + breadth(right)) * (times if isinstance(times, int) else 1))
        elif operator == "%" and isinstance(left, str):
            budget.require(formatted(left, budget.read(right), right if isinstance(right, tuple) else (right,)))
        else:
            budget.require(breadth(left) + breadth(right))
        result = super().call_binop(context, operator, left, right)
        budget.made(result)
        return result

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """A call of anything."""
        budget = BUDGET.get()
        budget.spend(ITEM)
        function, call = __obj, super().call
        if isinstance(function, _FREE):
            return call(__context, function, *args, **kwargs)
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        operands = (*args, *(value for key, value in kwargs.items() if key not in _HIDDEN))
        if isinstance(owner, str):
            args = tuple(_materialized(arg) for arg in args)
            growth = METHOD_GROWTH.get(name)
            budget.require(0 if growth is None else growth(owner, args))
            budget.spend(_slowness(name, owner, operands))
        budget.read(*((owner, *operands) if isinstance(owner, (str, list, tuple)) else operands))
        result = call(__context, function, *args, **kwargs)
        budget.made(result)
        return result


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it only renders its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """The block as a call of what is in it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


# Filters that no template can name: what is not an identifier only _Counting writes.
_SPEND, _STEP, _READ, _WRITE, _MADE = "<spend>", "<step>", "<read>", "<write>", "<made>"


def _spend(units: int) -> None:
    BUDGET.get().spend(units)


def _step(value: _Result) -> _Result:
    BUDGET.get().spend(STEP)
    return value


def _read(value: _Result) -> _Result:
    BUDGET.get().read(value)
    return value


def _write(value: _Result) -> _Result:
    BUDGET.get().write(value)
    return value


def _made(value: _Result) -> _Result:
    BUDGET.get().made(value)
    return value


class _Counting(NodeTransformer):
    """Puts the count into a template: at what repeats, and around what Jinja compiles to plain Python.

    Calls, filters, tests and operators are counted where the environment runs them.
    """

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        if node.test is not None:
            node.test = _around(node.test, _STEP)
        return self._count_body(node)

    def visit_Output(self, node: jinja2.nodes.Output) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.nodes = [
            each if isinstance(each, jinja2.nodes.TemplateData) else _around(each, _WRITE) for each in node.nodes
        ]
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.nodes = [_around(each, _WRITE) for each in node.nodes]
        return node

    def visit_Compare(self, node: jinja2.nodes.Compare) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.expr = _around(node.expr, _READ)
        for operand in node.ops:
            operand.expr = _around(operand.expr, _READ)
        return node

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, jinja2.nodes.Slice):
            return _around(node, _MADE)
        node.arg = _around(node.arg, _READ)
        return node

    def visit_Pair(self, node: jinja2.nodes.Pair) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.key = _around(node.key, _READ)
        return node

    def _count_body(self, node: Any) -> jinja2.nodes.Node:
        """Spends the steps of a body whenever it runs."""
        units = sum(map(_units, node.body))
        self.generic_visit(node)
        spend = _around(jinja2.nodes.Const(units, lineno=node.lineno), _SPEND)
        node.body.insert(0, jinja2.nodes.ExprStmt(spend, lineno=node.lineno))
        return node

    visit_Template = visit_Macro = visit_CallBlock = visit_Block = _count_body


def _around(node: jinja2.nodes.Expr, name: str) -> jinja2.nodes.Expr:
    if isinstance(node, jinja2.nodes.Const) and name == _READ:
        return node
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _units(node: jinja2.nodes.Node) -> int:
    """Of a part of a template that runs once; the bodies in it spend their own."""
    body = ("body",) if isinstance(node, _BODIES) else ()
    text = len(node.data) if isinstance(node, jinja2.nodes.TemplateData) else 0
    return STEP + text + sum(map(_units, node.iter_child_nodes(exclude=body)))


_BODIES = (jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.CallBlock, jinja2.nodes.Block)


def _counted(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """A function of operands that it looks at once and of which it makes little."""

    @wraps(function)
    def counted(*args: object, **kwargs: object) -> _Result:
        BUDGET.get().read(*args, *kwargs.values())
        return function(*args, **kwargs)

    return counted


def _counted_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter, bounded. What jinja2 passes it first, such as the context, is kept."""
    passed = int(hasattr(function, "jinja_pass_arg"))
    growth = FILTER_GROWTH.get(name)

    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        budget = BUDGET.get()
        context, value, more = args[:passed], args[passed], args[passed + 1 :]
        if name in LAZY_FILTERS:
            size = budget.read(*more, *kwargs.values())
            value = value if isinstance(value, jinja2.Undefined) else budget.counted(value)
        else:
            value = _materialized(value) if name in EAGER_FILTERS else value
            size = budget.read(value, *more, *kwargs.values())
            budget.spend(_slowness(name, value, more))
        budget.require(0 if growth is None else growth(value, size, more, kwargs))
        result = function(*context, value, *more, **kwargs)
        budget.made(result)
        return result

    return counted


def _materialized(value: object) -> object:
    """A generator as the list of what it yields."""
    if not isinstance(value, Iterator):
        return value
    values = list(cast("Iterator[object]", value))
    BUDGET.get().made(values)
    return values


def _slowness(name: str, text: object, operands: tuple[object, ...]) -> int:
    """Units of a search that may look at all of one string for each character of another."""
    if name not in SLOW or not isinstance(text, str):
        return 0
    return len(text) * sum(len(each) for each in operands if isinstance(each, str)) // ITEM


@lru_cache(maxsize=1)
def environment() -> Environment:
    """The one environment of the process. It has no state but the templates' code."""
    return Environment()


