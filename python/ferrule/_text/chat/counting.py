"""Rewrites templates so that every step spends from the budget.

The environment counts calls, filters, tests and operators (`sandbox.py`). For all other nodes of the syntax tree, this
module inserts hooks before the template is compiled. A hook is a filter whose name is not an identifier, so that
templates cannot use it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from ferrule._text.chat.budget import BUDGET, STEP
from ferrule.errors import ChatTemplateError

MAX_NODES = 1 << 13
"""Maximum number of nodes of a template, six times that of the largest in use. Compiling them takes 0.5 s and 70 MB."""

_Value = TypeVar("_Value")


def _spend(units: int) -> None:
    # A template can call this hook through `map` with any number.
    BUDGET.get().spend(max(units, STEP))


def _step(value: _Value) -> _Value:
    BUDGET.get().spend(STEP)
    return value


def _read(value: _Value) -> _Value:
    BUDGET.get().read(value)
    return value


def _write(value: _Value) -> _Value:
    BUDGET.get().write(value)
    return value


def _made(value: _Value) -> _Value:
    BUDGET.get().made(value)
    return value


def _part(value: object) -> str:
    return BUDGET.get().part(value)


def _joined(value: str) -> str:
    return BUDGET.get().joined(value)


HOOKS: dict[str, Callable[..., Any]] = {
    "<spend>": _spend,
    "<step>": _step,
    "<read>": _read,
    "<write>": _write,
    "<made>": _made,
    "<part>": _part,
    "<joined>": _joined,
}


class Counting(NodeTransformer):
    """Syntax tree visitor that inserts the hooks into a template."""

    def __init__(self) -> None:
        self._rewrites: dict[type[nodes.Node], Callable[[Any], nodes.Node]] = {
            nodes.Template: self._body,
            nodes.For: self._loop,
            nodes.Macro: self._body,
            nodes.CallBlock: self._body,
            nodes.Block: self._body,
            nodes.Output: self._texts,
            nodes.Concat: self._concatenation,
            nodes.Compare: self._comparison,
            nodes.Getitem: self._item,
            nodes.Pair: self._pair,
        }

    def get_visitor(self, node: nodes.Node) -> Callable[[Any], nodes.Node] | None:  # type: ignore[override]
        """Returns the method that rewrites a node; None if only its children are rewritten."""
        return self._rewrites.get(type(node))

    def _body(self, node: Any) -> nodes.Node:
        """Adds a hook that spends the steps of a body when it runs."""
        units = STEP + sum(map(_units, node.body))
        self.generic_visit(node)
        spend = _hooked(nodes.Const(units, lineno=node.lineno), "<spend>")
        node.body.insert(0, nodes.ExprStmt(spend, lineno=node.lineno))
        return node

    def _loop(self, node: nodes.For) -> nodes.Node:
        if node.test is not None:
            # Items that the test of the loop rejects do not reach the body, so they are counted here.
            node.test = _hooked(node.test, "<step>")
        return self._body(node)

    def _texts(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [each if _is_constant(each) else _hooked(each, "<write>") for each in node.nodes]
        return node

    def _concatenation(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_hooked(each, "<part>") for each in node.nodes]
        return _hooked(node, "<joined>")

    def _comparison(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        equals = len(node.ops) == 1 and node.ops[0].op in ("eq", "ne")
        if equals and (_is_constant(node.expr) or _is_constant(node.ops[0].expr)):
            return node  # a constant is at most as long as the template, and not a list
        node.expr = _hooked(node.expr, "<read>")
        for operand in node.ops:
            operand.expr = _hooked(operand.expr, "<read>")
        return node

    def _item(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _hooked(node, "<made>")
        if not _is_constant(node.arg):
            node.arg = _hooked(node.arg, "<read>")
        return node

    def _pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not _is_constant(node.key):
            node.key = _hooked(node.key, "<read>")
        return node


def counted(tree: nodes.Template) -> nodes.Template:
    """Inserts hooks into a template's tree, in place.

    Raises ChatTemplateError for more than MAX_NODES nodes.
    """
    found = sum(1 for _ in tree.find_all(nodes.Node))
    if found > MAX_NODES:
        raise ChatTemplateError(f"the chat template has {found} expressions and tags; the maximum is {MAX_NODES}")
    Counting().visit(tree)
    return tree


_BODIES = (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)


def _units(node: nodes.Node) -> int:
    """Returns the units of a body that runs once, with its literal text; nested bodies spend separately."""
    text = 0
    if isinstance(node, nodes.TemplateData):
        text = len(node.data)
    elif isinstance(node, nodes.Const):
        text = len(str(node.value))
    inner = node.iter_child_nodes(exclude=("body",) if isinstance(node, _BODIES) else ())
    return STEP + text + sum(map(_units, inner))


def _is_constant(node: nodes.Node) -> bool:
    return isinstance(node, (nodes.Const, nodes.TemplateData))


def _hooked(node: nodes.Node, hook: str) -> nodes.Filter:
    return nodes.Filter(node, hook, [], [], None, None, lineno=node.lineno)
