"""Options described once: the command line, the REST schema and the docs derive from a dataclass's fields.

A field of such a dataclass is written as

    max_workers: Annotated[int | None, Field(ge=1, le=10_000), UserOption("The plan", "Use at most N workers.")] = None

`Field` holds the bounds, which pydantic checks for requests and `solver.cli.option_groups` for the command line;
`refusal` turns both failures into the same sentence.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Union

from pydantic import AfterValidator, Field
from pydantic_core import PydanticKnownError

from dike.exceptions import BadInputError

MAX_TEXT = 4096
MAX_ITEMS = 10_000
_CHOICES = re.compile(r".* is not one of ('.*)", re.DOTALL)
"""Typer's message for a value that is not a choice."""
_NUMBER = re.compile(r"-?[0-9.]+(e[+-]?[0-9]+)?")
_UNIT = re.compile(r"_(s|mb|mib)$")


@dataclass(frozen=True)
class UserOption:
    """Describes a field that a user sets.

    Attributes:
        panel: title under which `--help` shows it.
        help: what it does, for `--help` and the REST schema.
        flag: the option on the command line; empty for the field's name without its unit.
        metavar: placeholder of the value in `--help`; None for that of its type.
        default: text for the default; empty to show the value.
        variable: environment variable for the value; empty for none.
        read: parses the given text; None for types that typer parses.
        reads: type of what `read` takes, `str` or `list[str]`.
        settable_on_resume: whether `dike tune --resume` can change it.
    """

    panel: str
    help: str
    flag: str = ""
    metavar: str | None = None
    default: str = ""
    variable: str = ""
    read: Callable[[Any], Any] | None = None
    reads: Any = str
    settable_on_resume: bool = False

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Any:
        """Adds the help to the REST schema."""
        return {**handler(schema), "description": self.help}


@dataclass(frozen=True)
class DescribedField:
    """A field, its option and its bounds.

    Attributes:
        name: of the field.
        option: its description.
        type: what the field holds, without None.
        default: its default.
        minimum, maximum: bounds of a number, inclusive; None for none.
        hint: its whole type, with bounds.
    """

    name: str
    option: UserOption
    type: Any
    default: Any
    minimum: float | None
    maximum: float | None
    hint: Any

    @property
    def parameter(self) -> str:
        """The command's parameter: `quantum` for `quantum_s`."""
        return self.option.flag.removeprefix("--").replace("-", "_") or _UNIT.sub("", self.name)

    @property
    def flag(self) -> str:
        """The option: `--quantum`."""
        return f"--{self.parameter.replace('_', '-')}"


@functools.cache
def described_fields(described: type) -> Mapping[str, DescribedField]:
    """The fields with a `UserOption`, by name, in the dataclass's order."""
    hints = typing.get_type_hints(described, include_extras=True)
    return {one.name: one for one in _described(described, hints)}


def _described(described: type, hints: Mapping[str, Any]) -> Iterator[DescribedField]:
    for one in dataclasses.fields(described):
        field_type, metadata = _plain(hints[one.name])
        option = next((item for item in metadata if isinstance(item, UserOption)), None)
        if option is None:
            continue
        bounds = [bound for item in metadata for bound in getattr(item, "metadata", ())]
        made = one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
        yield DescribedField(
            one.name,
            option,
            field_type,
            made,
            next((bound.ge for bound in bounds if hasattr(bound, "ge")), None),
            next((bound.le for bound in bounds if hasattr(bound, "le")), None),
            hints[one.name],
        )


def _plain(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Splits a type into the type without None and annotations, and the annotations."""
    metadata: tuple[Any, ...] = ()
    while True:
        if typing.get_origin(hint) is Annotated:
            metadata = (*hint.__metadata__, *metadata)
            hint = typing.get_args(hint)[0]
        elif typing.get_origin(hint) in (Union, types.UnionType):
            (hint,) = (one for one in typing.get_args(hint) if one is not type(None))
        else:
            return hint, metadata


def checked_by(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A validator for pydantic, of a function that raises `BadInputError`: the field is refused by its name."""

    def check(value: Any) -> Any:
        try:
            return read(value)
        except BadInputError as error:
            raise ValueError(str(error)) from error

    return check


def values_of(described: type, source: object) -> dict[str, Any]:
    """Reads the attributes named as a dataclass's fields from any object that has them."""
    return {one.name: getattr(source, one.name) for one in dataclasses.fields(described)}


def refusal(subject: str, error: Mapping[str, Any]) -> str:
    """One sentence for a value that pydantic refuses, without a full stop.

    Args:
        subject: name of the field or the option.
        error: one of `ValidationError.errors()`.
    """
    context, kind = error.get("ctx", {}), error["type"]
    said = str(error["msg"]).removeprefix("Value error, ").rstrip(".")
    expected = ""
    match kind:
        case "greater_than_equal":
            expected = f"at least {context['ge']:,.12g}"
        case "greater_than":
            expected = f"more than {context['gt']:,.12g}"
        case "less_than_equal":
            expected = f"at most {context['le']:,.12g}"
        case "less_than":
            expected = f"less than {context['lt']:,.12g}"
        case "int_parsing" | "int_type" | "int_from_float" | "int_parsing_size":
            expected = "a whole number"
        case "float_parsing" | "float_type" | "finite_number":
            expected = "a finite number"
        case "bool_parsing" | "bool_type":
            expected = "true or false"
        case "string_type":
            expected = "text"
        case "literal_error":
            expected = f"one of {context['expected']}".replace("'", "").replace(" or ", ", ")
        case "string_too_long" | "too_long":
            unit = "characters" if isinstance(error["input"], str) else "items"
            return f"{subject} has {len(error['input']):,} {unit}; it can have at most {context['max_length']:,}"
        case "string_unicode":
            return f"{subject} is not valid UTF-8"
        case "missing":
            return f"{subject} is missing"
        case "extra_forbidden" | "unexpected_keyword_argument":
            return f"{subject} is not a field of the request"
        case "value_error" if choices := _CHOICES.fullmatch(said):
            expected = f"one of {choices[1]}".replace("'", "")
    if expected:
        return f"{subject} is {_shown(error['input'])}; it must be {expected}"
    return f"{subject} {said}" if said[:1].islower() else f"{subject}: {said}"


def _shown(value: Any) -> str:
    # Numbers of a command line arrive as text.
    text = repr(value) if isinstance(value, str) and not _NUMBER.fullmatch(value) else str(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _storable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticKnownError("string_unicode") from None
    if "\0" in text:
        raise ValueError("holds a NUL character, which neither databases nor processes accept")
    return text


Text = Annotated[str, AfterValidator(_storable), Field(max_length=MAX_TEXT)]
"""A text that databases and processes accept."""
