"""`dike users add`, `rotate`, `remove` and `list`: edits the users file of a service."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dike.exceptions import BadInputError
from framework.cli.mesos_options import warn
from framework.cli.option_groups import with_options
from framework.cli.service_options import ServiceAccess, service_access
from framework.service.options import USERS_VARIABLE
from solver.cli.output import Format, console, print_json

if TYPE_CHECKING:
    import datetime

    from framework.service.users import User
    from framework.service.users_file import Changed

NEVER = "never"
MAX_VALID_DAYS = 36525
"""A hundred years: dates have four-digit years."""

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the user, as shown for jobs.", show_default=False)]
File = Annotated[
    Path,
    typer.Option("--users", envvar=USERS_VARIABLE, metavar="FILE", help="The users file.", show_default=False),
]


@app.callback()
def users() -> None:
    """Edits a service's users file.

    Creates, replaces and revokes tokens. A running service applies the changes.
    """


@app.command()
def add(
    name: Name,
    file: File,
    expires: Annotated[
        str | None, typer.Option(metavar="DATE|DAYS", help="The token's last day (UTC), such as 2027-01-31 or 90d.")
    ] = None,
    weight: Annotated[
        float, typer.Option(help="Weight in the queue: with 2, the user's fair share is twice as large.")
    ] = 1.0,
    admin: Annotated[bool, typer.Option("--admin", help="Let the user end all jobs and read their output.")] = False,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Create no token; for users that a proxy signs in.")
    ] = False,
) -> None:
    """Adds a user, and prints the new token. The file stores only its hash."""
    from framework.service.users_file import UsersFile

    if not 0 < weight <= 1e6:
        raise BadInputError(f"--weight is {weight:g}; it must be above 0 and at most 1000000.")
    if no_token and expires is not None:
        raise BadInputError(
            "--expires sets the last day of a token, and --no-token creates none; leave one of them out."
        )
    date = None if expires is None else _last_day(expires)
    made = UsersFile(file).add(name, has_token=not no_token, expires=date, weight=weight, admin=admin)
    _report(made, file)


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
    """Creates a new token for a user, prints it, and revokes the old one."""
    from framework.service.users_file import UsersFile

    date = None if expires in (None, NEVER) else _last_day(expires)
    _report(UsersFile(file).rotate(name, expires=date, keeps_date=expires is None), file)


@app.command()
def remove(name: Name, file: File) -> None:
    """Removes a user, and so revokes the token; jobs of the user continue."""
    from framework.service.users_file import UsersFile

    _report(UsersFile(file).remove(name), file)


@app.command("list")
def list_users(
    file: File,
    output_format: Annotated[Format, typer.Option("--format", help="How to print the result.")] = Format.TABLE,
) -> None:
    """Lists the users, the last day of their tokens, and their limits."""
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


@app.command()
@with_options(access=service_access)
def usage(
    *,
    weeks: Annotated[int, typer.Option(help="Number of weeks, this one included.", min=1, max=520)] = 4,
    access: ServiceAccess,
    output_format: Annotated[Format, typer.Option("--format", help="How to print the result.")] = Format.TABLE,
) -> None:
    """Shows what the jobs of each user have used, by week: hours of GPUs and CPUs, and waiting.

    Asks the service; only administrators see other users.
    """
    with access.client() as client:
        rows = client.usage(weeks)
    if output_format is Format.JSON:
        print_json({"usage": [row.model_dump(mode="json") for row in rows]})
        return
    from solver.cli.output import new_table

    table = new_table("Usage", "week of", "user", "jobs", "GPU hours", "CPU hours", "hours of waiting")
    for row in rows:
        hours = (f"{each:.2f}" for each in (row.gpu_hours, row.cpu_hours, row.waited_hours))
        table.add_row(row.week.isoformat(), row.user, str(row.jobs), *hours)
    console().print(table)


def _last_day(text: str) -> datetime.date:
    """Reads `--expires` as a date.

    Raises:
        BadInputError: if it is malformed, or before today.
    """
    import datetime

    from framework.service.users import today

    days = re.fullmatch(r"([0-9]{1,5})d", text, re.ASCII)
    if days is not None and int(days[1]) <= MAX_VALID_DAYS:
        return today() + datetime.timedelta(days=int(days[1]))
    try:
        date = datetime.datetime.strptime(text, "%Y-%m-%d").date()
    except ValueError:
        raise BadInputError(
            f"'{text}' is not a value of --expires; write a date like 2027-01-31, or days from now like 90d."
        ) from None
    if date < today():
        raise BadInputError(f"--expires {text} is in the past; give today or a later day.")
    return date


def _report(made: Changed, file: Path) -> None:
    if made.token is not None:
        print(made.token)
    if made.has_lost_comments:
        warn(f"{file} was rewritten without its comments.")
    if made.was_open:
        warn(f"Only its owner can read {file} now; run the service as that account.")


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
    from framework.scheduler.queue_options import Priority
    from solver.units import format_bytes

    limits = user.limits
    counts = {"open jobs": limits.open_jobs, "trials": limits.trials}
    sizes = {"output": limits.output_bytes, "bundles": limits.bundle_bytes}
    parts = [f"{count} {what}" for what, count in counts.items() if count is not None]
    if limits.priority is not Priority.HIGH:
        parts.append(f"priority {limits.priority}")
    return ", ".join(parts + [f"{format_bytes(size)} of {what}" for what, size in sizes.items() if size is not None])
