"""Chat templates that would use unlimited time or memory, each in a separate process.

The templates use every known way to create large values from small ones, and every operation on a value nested 60
levels deep that contains the level below twice, so that its text has 2^60 parts.
"""

import pytest

from faults.isolated import PROMISED_SECONDS, SLACK, assert_refused, run

WARM_UP = """
    from ferrule._text.chat import render_chat
    def render(template, **more):
        return render_chat(template, [{"role": "user", "content": "Hi"}], special_tokens={}, **more)
    render("{{ messages | length }}")
"""
WORK = ["exceeds its limit of", "units of work"]
NESTED = ["nested too deeply"]

A = "{% set a = 'a' * 400000 %}"
LIST = "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
TUPLE = "{% set ns = namespace(x=('a',)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
MAP = "{% set ns = namespace(x={}) %}{% for i in range(60) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}"

LOOPS = {
    "range": ("{% for i in range(10**9) %}{% endfor %}", ["Range too big", "100000"]),
    "nested-loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", WORK),
    "nested-loops-that-write": (
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        WORK,
    ),
    "loops-that-drop-all": (
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
        WORK,
    ),
    "recursive-loop": ("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}", NESTED),
    "doubling-loop": (
        "{% for x in [1] recursive %}{% if loop.depth < 60 %}{{ loop([1]) }}{{ loop([1]) }}{% endif %}{% endfor %}",
        WORK,
    ),
    "recursive-macro": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", NESTED),
    "doubling-macro": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        WORK,
    ),
    "doubling-caller": (
        "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
        + "{% call f() %}" * 18
        + "x" * 9
        + "{% endcall %}" * 18,
        WORK,
    ),
    "recursive-block": ("{% block a %}{{ self.a() }}{% endblock %}", NESTED),
    "lazy-filters": ("{% for i in range(99999) %}{{ range(99999) | selectattr('x') | list }}{% endfor %}", WORK),
    "refunds": (
        "{% for i in range(99999) %}{% for j in range(99) %}{% set x = [-99999] | map('<spend>') | list %}{% endfor %}"
        "{% endfor %}",
        WORK,
    ),
    "refunds-of-concatenations": (
        A + "{% for i in range(99999) %}{% set x = [a, ''] | map('<joined>') | list %}"
        "{% set y = [1.5] | map('<part>') | map('<joined>') | list %}{% endfor %}",
        WORK,
    ),
    "freed-concatenations": (A + "{% for i in range(99999) %}{% set x = a ~ i %}{% endfor %}", WORK),
    "sums": ("{% for i in range(99999) %}{% set x = range(99999) | sum %}{% endfor %}", WORK),
}
SOURCES = {
    "50000-ifs": ("{% if true %}" * 50_000 + "{% endif %}" * 50_000, ["1200000 characters", "65536"]),
    "2500-ifs": ("{% if true %}" * 2500 + "{% endif %}" * 2500, NESTED),
    "parentheses": ("{{" + "(" * 30_000 + "1" + ")" * 30_000 + "}}", NESTED),
    "sum-of-30000": ("{{" + "1+" * 30_000 + "1}}", NESTED),
    "many-tags": ("{% set x = a %}" * 4000, ["12000 expressions and tags", "8192"]),
}
GROWTH = {
    "multiplied-text": ("{{ 'a' * 10**9 }}", WORK),
    "multiplied-constant": ("{% set x = 'a' * 1000000000 %}", WORK),
    "multiplied-list": ("{{ 10**9 * [1] }}", WORK),
    "power": ("{{ 10 ** 10000000 }}", ["65536 bits"]),
    "squared": (
        "{% set ns = namespace(x=7) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        ["65536 bits"],
    ),
    "center": ("{{ 'a' | center(1000000000) }}", WORK),
    "center-method": ("{{ 'a'.center(10**9) }}", WORK),
    "zfill": ("{{ 'a'.zfill(10**9) }}", WORK),
    "indent": ("{{ ('a\n' * 99999) | indent(99999) }}", WORK),
    "percent": ("{{ '%1000000000d' % 1 }}", WORK),
    "percent-star": ("{{ '%*d' % (10**9, 1) }}", WORK),
    "percent-of-a-test": ("{{ '%1000000000d' is odd }}", WORK),
    "percent-many": ("{% set a = 'x' * 99999 %}{{ ('%(a)s' * 9999) % {'a': a} }}", WORK),
    "format": ("{{ '{:1000000000}'.format(1) }}", WORK),
    "format-nested": ("{{ '{:{}}'.format(1, 10**9) }}", WORK),
    "format-nested-deep": ("{{ '{:{a[0]}}'.format(1, a=[10**9]) }}", WORK),
    "format-filter": ("{{ '%1000000000d' | format(1) }}", WORK),
    "tilde": ("{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", WORK),
    "plus": ("{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}", WORK),
    "join": ("{{ range(99999) | join('y' * 9999) }}", WORK),
    "join-method": ("{{ ('y' * 9999).join(range(9999) | map('string')) }}", WORK),
    "replace": ("{{ ('a' * 99999) | replace('a', 'b' * 99999) }}", WORK),
    "replace-method": ("{{ ('a' * 99999).replace('', 'b' * 99999) }}", WORK),
    "json-indent": ("{{ [1, 2] | tojson(indent=1000000000) }}", WORK),
    "json-separators": ("{{ ([1] * 999) | tojson(separators=['x' * 99999, 'y']) }}", WORK),
    "round": ("{{ 1.5 | round(1000000000, 'ceil') }}", WORK),
    "round-text": ("{{ ('a' * 99999) | round(5, 'ceil') }}", WORK),
    "batch": ("{{ [1] | batch(1000000000, 'x') | list }}", WORK),
    "slice": ("{{ [1] | slice(1000000000) | list }}", WORK),
    "sum-of-lists": ("{{ ([[1] * 999] * 999) | sum(start=[]) }}", WORK),
    "split": (A + "{{ a.split('a') | length }}", WORK),
    "characters": (A + "{{ a | list | length }}", WORK),
    "kept-slices": (
        A + "{% set ns = namespace(x=0) %}{% for i in range(99) %}{% set ns.x = [ns.x, a[1:]] %}{% endfor %}",
        WORK,
    ),
    "kept-concatenations": (
        A + "{% set ns = namespace(x=0) %}{% for i in range(99) %}{% set ns.x = [ns.x, a ~ i] %}{% endfor %}",
        WORK,
    ),
    "kept-sums": (
        A + "{% set ns = namespace(x=0) %}{% for i in range(99) %}{% set ns.x = [ns.x, a + 'b'] %}{% endfor %}",
        WORK,
    ),
    "many-operands": (A + "{{ " + " ~ ".join("a" * 500) + " }}", WORK),
    "kept-lists": (
        "{% set ns = namespace(x=0) %}{% for i in range(9999) %}{% set ns.x = [ns.x, ["
        + "1," * 4000
        + "]] %}{% endfor %}",
        WORK,
    ),
    "deep": (
        "{% set ns = namespace(x=()) %}{% for i in range(9999) %}{% set ns.x = (ns.x,) %}{% endfor %}{{ {ns.x: 1} }}",
        ["more than 100 levels of nesting"],
    ),
    "search-from-the-end": (A + "{{ a.rfind('b' + a) }}", WORK),
    "strip": (A + "{{ ('b' * 99999).strip(a + 'b') }}", WORK),
    "colliding-keys": ("{{ dict(range(0, 40000 * (2**61 - 1), 2**61 - 1) | batch(2) | list) }}", WORK),
}
USES = {
    "text": (LIST, "{{ ns.x }}"),
    "json": (LIST, "{{ ns.x | tojson }}"),
    "tilde": (LIST, "{% set y = ns.x ~ '' %}"),
    "macro": (LIST, "{% macro f(a) %}{{ a }}{% endmacro %}{% set y = f(ns.x) %}"),
    "block": (LIST, "{% set y %}{{ ns.x }}{% endset %}"),
    "equal": (LIST, "{% set y = ns.x %}" + LIST + "{{ ns.x == y }}"),
    "equal-test": (LIST, "{% set y = ns.x %}" + LIST + "{{ ns.x is eq(y) }}"),
    "in": (LIST, "{% set y = ns.x %}" + LIST + "{{ ns.x in [y] }}"),
    "sort": (LIST, "{% set y = ns.x %}" + LIST + "{{ [ns.x, y] | sort }}"),
    "index": (LIST, "{% set y = ns.x %}" + LIST + "{{ [y].index(ns.x) }}"),
    "percent": (LIST, "{{ '%s' % ns.x }}"),
    "format": (LIST, "{{ '{}'.format(ns.x) }}"),
    "join": (LIST, "{{ [ns.x] | join }}"),
    "map": (LIST, "{{ [ns.x] | map('string') | list | length }}"),
    "upper": (LIST, "{{ ns.x is upper }}"),
    "raise": (LIST, "{{ raise_exception(ns.x) }}"),
    "attr": (TUPLE, "{{ messages | attr(ns.x) }}"),
    "key": (TUPLE, "{{ {ns.x: 1} | length }}"),
    "item": (TUPLE, "{{ messages[0][ns.x] }}"),
    "get": (TUPLE, "{{ messages[0].get(ns.x) }}"),
    "dict": (TUPLE, "{{ dict([(ns.x, 1)]) | length }}"),
    "unique": (TUPLE, "{{ [ns.x] | unique | list | length }}"),
    "filter-test": (TUPLE, "{{ ns.x is filter }}"),
    "changed": (TUPLE, "{% for i in [1, 2] %}{{ loop.changed(ns.x) }}{% endfor %}"),
    "map-text": (MAP, "{{ ns.x }}"),
    "map-arguments": (MAP, "{{ dict(**ns.x) | length }}"),
}
TEMPLATES = {
    **{f"loops-{name}": case for name, case in LOOPS.items()},
    **{f"source-{name}": case for name, case in SOURCES.items()},
    **{f"growth-{name}": case for name, case in GROWTH.items()},
    **{f"doubled-{name}": (made + used, WORK) for name, (made, used) in USES.items()},
}


@pytest.mark.parametrize(("template", "fragments"), [pytest.param(*case, id=name) for name, case in TEMPLATES.items()])
def test_template_over_resource_limit_is_a_typed_error(template: str, fragments: list[str]) -> None:
    outcome = run("render(arguments[0])", template, warm_up=WARM_UP)
    assert_refused(outcome, "ChatTemplateError", fragments)
    assert "ValueError" in outcome.bases


def test_template_over_time_limit_is_a_typed_error() -> None:
    warm_up = (
        WARM_UP
        + """
    import ferrule._text.chat.budget as budget
    budget.BASE_UNITS, budget.BASE_SECONDS = 1 << 50, 0.2
    """
    )
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    outcome = run("render(arguments[0])", loops, warm_up=warm_up)
    assert_refused(outcome, "ChatTemplateError", ["exceeds its limit of 0.2 seconds of processor time"])


def test_long_key_is_not_repeated_for_each_nested_value() -> None:
    fault = """
        many = {"k" * (2 << 20): [0] * 400_000}
        render("{{ messages | length }}", documents=[{"a": many}], arguments={"b": object()})
    """
    outcome = run(fault, warm_up=WARM_UP)
    assert outcome.error == "ChatTemplateError"
    assert "chat_template_kwargs['b'] must be a dict, list, string, " in outcome.message
    assert outcome.seconds < PROMISED_SECONDS * SLACK


@pytest.mark.parametrize(
    ("fault", "fragments"),
    [
        (r"render('{{ messages.__class__.__mro__[1].__subclasses__() }}')", ["__class__", "unsafe"]),
        (r"render('{{ cycler.__init__.__globals__.os.system(1) }}')", ["__init__", "unsafe"]),
        ("render('', arguments={'messages': []})", ["chat_template_kwargs must not have messages"]),
        (
            "render('', arguments={'continue_final_message': True})",
            ["chat_template_kwargs must not have continue_final_message"],
        ),
        (r"""render("{{ raise_exception('Roles must alternate') }}")""", ["Roles must alternate"]),
    ],
)
def test_invalid_template_or_argument_is_a_typed_error(fault: str, fragments: list[str]) -> None:
    assert_refused(run(fault, warm_up=WARM_UP), "ChatTemplateError", fragments)
