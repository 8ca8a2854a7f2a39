"""`dike users add`, `rotate`, `remove` and `list`: who may use a service, in its users file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dike.exceptions import BadInputError
from framework.cli.mesos_options import warn
from framework.service.options import USERS_VARIABLE
from solver.cli.output import Format, console, print_json

if TYPE_CHECKING:
    import datetime

    from framework.service.users import User
    from framework.service.users_file import Changed

NEVER = "never"
LONGEST_DAYS = 36525
"""A hundred years; a date has to have four digits for its year."""

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The user's name, as jobs show it.", show_default=False)]
File = Annotated[
    Path,
    typer.Option("--users", envvar=USERS_VARIABLE, metavar="FILE", help="The users file.", show_default=False),
]


@app.callback()
def users() -> None:
    """Edits a service's users file.

    Makes, replaces and withdraws tokens; a running service notices.
    """


@app.command()
def add(
    name: Name,
    file: File,
    expires: Annotated[
        str | None, typer.Option(metavar="DATE|DAYS", help="The token's last day (UTC), such as 2027-01-31 or 90d.")
    ] = None,
    weight: Annotated[float, typer.Option(help="Weight in the queue, relative to other users.")] = 1.0,
    admin: Annotated[bool, typer.Option("--admin", help="Lets the user end all jobs and read their output.")] = False,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Make no token: for a user whom a proxy signs in.")
    ] = False,
) -> None:
    """Adds a user, and prints the new token, which is kept nowhere."""
    from framework.service.users_file import UsersFile

    if not 0 < weight <= 1e6:
        raise BadInputError(f"--weight {weight:g} cannot be; give a number above 0 and up to 1000000.")
    if no_token and expires is not None:
        raise BadInputError("--expires is the last day of a token, and with --no-token there is none.")
    date = None if expires is None else _last_day(expires)
    made = UsersFile(file).add(name, has_token=not no_token, expires=date, weight=weight, admin=admin)
    _tell(made, file)


@app.command()
def rotate(
    name: Name,
    file: File,
    expires: Annotated[
        str | None,
        typer.Option(
            metavar="DATE|DAYS|never",
            help="The new token's last day (UTC).",
            show_default="as before",
        ),
    ] = None,
) -> None:
    """Makes a new token for a user, prints it, and withdraws the one before."""
    from framework.service.users_file import UsersFile

    date = None if expires in (None, NEVER) else _last_day(expires)
    _tell(UsersFile(file).rotate(name, expires=date, keeps_date=expires is None), file)


@app.command()
def remove(name: Name, file: File) -> None:
    """Takes a user out, and so withdraws the token; jobs of the user go on."""
    from framework.service.users_file import UsersFile

    _tell(UsersFile(file).remove(name), file)


@app.command("list")
def list_users(
    file: File,
    output_format: Annotated[Format, typer.Option("--format", help="How to print it.")] = Format.TABLE,
) -> None:
    """Shows who is in the file, until when tokens are valid, and who may have how much."""
    from framework.service.users_file import UsersFile

    found = UsersFile(file).users()
    if output_format is Format.JSON:
        print_json({"users": [_values(user) for user in found]})
        return
    from solver.cli.output import new_table

    table = new_table("Users", "user", "admin", "weight", "token", "limits")
    for user in found:
        table.add_row(user.name, "yes" if user.admin else "", f"{user.weight:g}", _token(user), _limits(user))
    console().print(table)


def _last_day(text: str) -> datetime.date:
    """The date that an option tells, not before today.

    Raises:
        BadInputError: if it is none, or over.
    """
    import datetime

    from framework.service.users import today

    days = re.fullmatch(r"([0-9]{1,5})d", text, re.ASCII)
    if days is not None and int(days[1]) <= LONGEST_DAYS:
        return today() + datetime.timedelta(days=int(days[1]))
    try:
        date = datetime.datetime.strptime(text, "%Y-%m-%d").date()
    except ValueError:
        raise BadInputError(
            f"--expires {text} is no last day of a token; write a date like 2027-01-31, or days from now like 90d."
        ) from None
    if date < today():
        raise BadInputError(f"--expires {text} is over; give a day that is to come.")
    return date


def _tell(made: Changed, file: Path) -> None:
    if made.token is not None:
        print(made.token)
    if made.has_lost_comments:
        warn(f"{file} had to be written anew, and its comments are lost.")
    if made.was_open:
        warn(f"Only its owner can read {file} now; the service has to run as that account.")


def _values(user: User) -> dict[str, Any]:
    import dataclasses

    return {
        **dataclasses.asdict(user),
        "expires": None if user.expires is None else user.expires.isoformat(),
        "has_expired": user.has_expired,
    }


def _token(user: User) -> str:
    if not user.has_token:
        return "none: signed in by a proxy"
    if user.expires is None:
        return "valid"
    return f"expired after {user.expires}" if user.has_expired else f"valid until {user.expires}"


def _limits(user: User) -> str:
    from solver.units import format_bytes

    limits = user.limits
    counts = {"open jobs": limits.open_jobs, "trials": limits.trials}
    sizes = {"output": limits.output_bytes, "bundles": limits.bundle_bytes}
    parts = [f"{count} {what}" for what, count in counts.items() if count is not None]
    return ", ".join(parts + [f"{format_bytes(size)} of {what}" for what, size in sizes.items() if size is not None])
