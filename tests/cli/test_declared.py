"""Options that follow from the declaration of parameters: types, choices, help texts, errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import click
import pytest
from click.testing import CliRunner

from ferrule._cli.declared import row
from ferrule._cli.help import Command, options
from ferrule._cli.run import command as run_command
from ferrule._cli.sampling import DECLARED, OTHER, WITHOUT_OPTION
from ferrule._params.declaration import Choice, Doc, Flag, Integer, Number, parameters
from ferrule.errors import InvalidParameterError


@dataclass
class Declared:
    share: Annotated[float, Number(0, 1, above_low=True), Doc("Share of `top_count`; 1 is `all`.")] = 0.5
    top_count: Annotated[int | None, Integer(1, 8), Doc("Number of items. None: the model's `item_count`.")] = None
    kind: Annotated[str, Choice(("one", "two")), Doc("Kind of the items.")] = "one"
    names: Annotated[tuple[str, ...], Doc("Names of the items.")] = ("a", "b")
    place: Annotated[str | None, Doc("Place of the items.")] = None
    wanted: Annotated[bool, Flag(), Doc("Whether to keep the items.")] = False
    cached: Annotated[bool, Flag(), Doc("Whether to store the items.")] = True


ROWS = {name: row(parameter) for name, parameter in parameters(Declared).items()}


@pytest.mark.parametrize(
    ("name", "option", "text"),
    [
        ("share", "--share", "Share of --top-count; 1 is all (default 0.5)."),
        ("top_count", "--top-count", "Number of items (default: the model's --item-count)."),
        ("kind", "--kind", "Kind of the items (default one)."),
        ("names", "--names", "Names of the items (default: 'a', 'b')."),
        ("place", "--place", "Place of the items (default: none)."),
        ("wanted", "--wanted", "Keep the items."),
        ("cached", "--no-cached", "Do not store the items."),
    ],
)
def test_option_name_and_help_come_from_declaration(name: str, option: str, text: str) -> None:
    names, settings = ROWS[name]
    assert names == (option, name)
    assert settings["help"] == text


def test_settings_override_parts_of_help_text() -> None:
    declared = parameters(Declared)
    assert row(declared["top_count"], default=4)[1]["help"] == "Number of items (default 4)."
    assert row(declared["top_count"], unset="all")[1]["help"] == "Number of items (default: all)."
    assert row(declared["names"], multiple=True, effect="Item")[1]["help"] == (
        "Item (default: 'a', 'b'). May be repeated."
    )
    assert row(declared["cached"], "--fresh", effect="Read the items again")[0] == ("--fresh", "cached")


def parsed(*arguments: str) -> dict[str, Any]:
    given: dict[str, Any] = {}

    @click.command(cls=Command, examples=[])
    @options("Items", list(ROWS.values()))
    def command(**values: Any) -> None:
        given.update(values)

    result = CliRunner().invoke(command, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return given


def test_values_have_the_declared_types() -> None:
    given = parsed("--share", "1", "--top-count", "8", "--kind", "two", "--wanted", "--no-cached")
    assert (given["share"], given["top_count"], given["kind"]) == (1.0, 8, "two")
    assert isinstance(given["share"], float)
    assert (given["wanted"], given["cached"]) == (True, False)
    assert parsed()["cached"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--share", "0"], "share must be a number > 0 and <= 1, got 0.0"),
        (["--share", "half"], "share must be a number > 0 and <= 1, got 'half'"),
        (["--top-count", "9"], "top_count must be an integer from 1 to 8, got 9"),
        (["--top-count", "1.5"], "top_count must be an integer from 1 to 8, got '1.5'"),
    ],
)
def test_out_of_bounds_error_names_declared_requirement(arguments: list[str], message: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        parsed(*arguments)
    assert str(caught.value) == message


def test_sampling_parameters_are_options_with_their_documentation() -> None:
    by_name = {parameter.name: parameter for parameter in run_command.params}
    for name in DECLARED.keys() - WITHOUT_OPTION:
        assert isinstance(option := by_name[name], click.Option)
        assert option.help, name
    assert {"dry_base", "mirostat_eta", "xtc_threshold"} < set(OTHER)
    assert isinstance(option := by_name["mirostat_eta"], click.Option)
    assert option.help == f"{DECLARED['mirostat_eta'].doc.removesuffix('.')} (default 0.1)."
