"""`_native.pyi` declares exactly the names and parameters of the extension module.

The type checker relies on the stub.
"""

import ast
import inspect
from pathlib import Path

import ferrule
from ferrule import _native

STUB = Path(ferrule.__file__).with_name("_native.pyi")


def public_names(thing: object) -> set[str]:
    return {name for name in vars(thing) if not name.startswith("_")}


def declared(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Returns the names that a module or a class body of the stub declares."""
    names: dict[str, ast.stmt] = {}
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                names[name] = statement
            case ast.Import() | ast.ImportFrom() | ast.Expr():
                pass
            case _:
                raise AssertionError(f"line {statement.lineno} of the stub: a form that this test does not support")
    return names


def stub_parameters(function: ast.FunctionDef) -> list[tuple[str, object]]:
    """Returns names and defaults of a function's parameters, without `self` and `cls`."""
    assert function.args.vararg is None, "a form that this test does not support"
    assert function.args.kwarg is None, "a form that this test does not support"
    positional = [*function.args.posonlyargs, *function.args.args]
    missing = [inspect.Parameter.empty] * (len(positional) - len(function.args.defaults))
    defaults = [*missing, *(ast.literal_eval(default) for default in function.args.defaults)]
    keyword = [inspect.Parameter.empty if d is None else ast.literal_eval(d) for d in function.args.kw_defaults]
    pairs = [(argument.arg, default) for argument, default in zip(positional, defaults, strict=True)]
    pairs += [(argument.arg, default) for argument, default in zip(function.args.kwonlyargs, keyword, strict=True)]
    return [(name, default) for name, default in pairs if name not in {"self", "cls"}]


def real_parameters(function: object) -> list[tuple[str, object]]:
    assert callable(function)
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.default) for p in parameters if p.name not in {"self", "cls"}]


def is_property(function: ast.FunctionDef) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "property" for d in function.decorator_list)


def check_class(stub: ast.ClassDef, real: type) -> None:
    members = declared(stub.body)
    assert {name for name in members if not name.startswith("_")} == public_names(real), stub.name
    for name, member in members.items():
        where = f"{stub.name}.{name}"
        if not isinstance(member, ast.FunctionDef) or is_property(member):
            assert inspect.isdatadescriptor(vars(real)[name]), f"{where} is not a property"
        elif name == "__init__":
            assert stub_parameters(member) == real_parameters(real), where
        else:
            assert stub_parameters(member) == real_parameters(getattr(real, name)), where


def test_stub_matches_module() -> None:
    stub = declared(ast.parse(STUB.read_text()).body)
    assert {name for name in stub if not name.startswith("_")} == public_names(_native)
    for name, statement in stub.items():
        real = getattr(_native, name)
        match statement:
            case ast.ClassDef():
                check_class(statement, real)
            case ast.FunctionDef():
                assert stub_parameters(statement) == real_parameters(real), name
            case _:
                assert not callable(real), f"{name} is a plain value in the stub"
