"""Options that are described once: the command line and a request take the same values and refuse with one sentence."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from typer.testing import CliRunner

from dike.described import Text, UserOption, described_fields, refusal
from dike.exceptions import BadInputError
from framework.cli import _as_bad_input
from framework.cli import app as dike
from framework.search.records import SearchOptions, SearchSpec
from framework.service.requests import TrainingRequest
from framework.training.options import TrainingOptions
from framework.training.spec import JobSpec
from solver.cli.option_groups import options_of, with_options
from solver.settings import PlanOptions

PANEL = "The cake"
LONG = "x" * 5000


@dataclass(frozen=True, kw_only=True)
class Cake:
    """A cake order."""

    eggs: Annotated[int | None, Field(ge=1, le=12), UserOption(PANEL, "How many eggs.")] = None
    bake_s: Annotated[float, Field(gt=0, allow_inf_nan=False), UserOption(PANEL, "Seconds in the oven.")] = 60.0
    taste: Annotated[Literal["sweet", "sour"], UserOption(PANEL, "How it tastes.")] = "sweet"
    is_vegan: Annotated[bool, UserOption(PANEL, "Whether it is vegan.")] = False
    name: Annotated[Text, UserOption(PANEL, "What it is called.")] = ""
    layers: Annotated[
        tuple[Text, ...],
        Field(max_length=2),
        UserOption(PANEL, "What is inside; repeatable.", flag="--layer", read=tuple, reads=list[str]),
    ] = ()


@pydantic_dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Order(Cake):
    """A request."""


def typed(*words: str) -> Cake:
    """What a command line makes of these words."""
    made: list[Cake] = []

    @with_options(cake=options_of(Cake))
    def bake(*, cake: Cake) -> None:
        made.append(cake)

    group = typer.Typer(rich_markup_mode=None)
    group.command()(bake)
    with _as_bad_input("bake"):
        typer.main.get_command(group).main(list(words), standalone_mode=False)
    return made[0]


def test_what_is_not_typed_has_the_default_of_the_field() -> None:
    assert typed() == Cake()
    assert typed("--is-vegan", "--eggs", "3", "--bake", "0.5", "--layer", "jam", "--layer", "cream") == Cake(
        eggs=3, bake_s=0.5, is_vegan=True, layers=("jam", "cream")
    )


@pytest.mark.parametrize(
    ("words", "values", "field", "flag", "says"),
    [
        (("--eggs", "0"), {"eggs": 0}, "eggs", "--eggs", "is 0; it must be at least 1"),
        (("--eggs", "13"), {"eggs": 13}, "eggs", "--eggs", "is 13; it must be at most 12"),
        (("--eggs", "few"), {"eggs": "few"}, "eggs", "--eggs", "is 'few'; it must be a whole number"),
        (("--bake", "0"), {"bake_s": 0.0}, "bake_s", "--bake", "is 0.0; it must be more than 0"),
        (("--bake", "long"), {"bake_s": "long"}, "bake_s", "--bake", "is 'long'; it must be a finite number"),
        (("--taste", "salty"), {"taste": "salty"}, "taste", "--taste", "is 'salty'; it must be one of sweet, sour"),
        (
            ("--name", "x" * 5000),
            {"name": "x" * 5000},
            "name",
            "--name",
            "has 5,000 characters; it can have at most 4,096",
        ),
        (("--name", "\udcff"), {"name": "\udcff"}, "name", "--name", "is not valid UTF-8"),
        (
            ("--layer", "a", "--layer", "b", "--layer", "c"),
            {"layers": ["a", "b", "c"]},
            "layers",
            "--layer",
            "has 3 items; it can have at most 2",
        ),
    ],
)
def test_a_value_is_refused_in_the_same_words(
    words: tuple[str, ...], values: dict[str, Any], field: str, flag: str, says: str
) -> None:
    with pytest.raises(BadInputError) as on_command_line:
        typed(*words)
    assert str(on_command_line.value) == f"{flag} {says}."
    with pytest.raises(ValidationError) as in_request:
        TypeAdapter(Order).validate_python(values)
    assert refusal(field, in_request.value.errors()[0]) == f"{field} {says}"


def test_the_schema_of_a_request_has_the_help_of_the_options() -> None:
    eggs = TypeAdapter(Order).json_schema()["properties"]["eggs"]
    assert eggs["description"] == "How many eggs."


@pytest.mark.parametrize(
    ("described", "command", "holders"),
    [
        (TrainingOptions, "run", (JobSpec, TrainingRequest)),
        (TrainingOptions, "submit", (JobSpec, TrainingRequest)),
        (PlanOptions, "plan", (TrainingRequest,)),
        (SearchOptions, "tune", (SearchSpec,)),
    ],
)
def test_every_described_option_is_on_the_command_line_and_in_what_is_sent_and_stored(
    described: type, command: str, holders: tuple[type, ...]
) -> None:
    shown = CliRunner().invoke(dike, [command, "--help"], env={"COLUMNS": "200"}).stdout
    for name, field in described_fields(described).items():
        assert f" {field.flag}" in shown
        for holder in holders:
            assert name in {one.name for one in dataclasses.fields(holder)}, holder
