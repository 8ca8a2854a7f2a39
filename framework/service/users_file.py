"""Edits a users file (`framework.service.users`) in place, so that comments and order are kept."""

from __future__ import annotations

import contextlib
import copy
import datetime
import fcntl
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dike.exceptions import BadInputError
from framework.service.users import (
    User,
    check_user_name,
    digest,
    new_token,
    parse_users,
    read_users,
    validate_users,
)
from framework.user_folders import OTHERS_MODE
from solver.strict_yaml import NOT_YAML

_CREDENTIALS = ("token_sha256", "token", "no_token")
_COMMENT = re.compile(r"(?:^|\s)#")

_Pair = tuple[yaml.Node, yaml.Node]
_Edit = tuple[int, int, str]
"""Start and end of a part of a text, and its replacement."""


@dataclass(frozen=True)
class Changed:
    """The result of a change.

    Attributes:
        token: the new token, if one was created.
        has_lost_comments: whether the file had to be rewritten without its comments.
        was_open: whether other accounts could read the file before.
    """

    token: str | None
    has_lost_comments: bool
    was_open: bool


class UsersFile:
    """A users file for editing. Changes are atomic, by one process at a time; only the owner can read the new file.

    Raises:
        BadInputError: from every method, if the file is malformed or inaccessible, or the change is invalid; it stays
            unchanged then.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()

    def users(self) -> list[User]:
        return list(read_users(self._path).values())

    def add(
        self,
        name: str,
        *,
        has_token: bool = True,
        expires: datetime.date | None = None,
        weight: float = 1.0,
        admin: bool = False,
    ) -> Changed:
        """Adds a user; creates the file if missing. See `User` for the fields."""
        check_user_name(name)
        token = new_token() if has_token else None
        entry: dict[str, Any] = {"no_token": True} if token is None else {"token_sha256": digest(token)}
        if expires is not None:
            entry["expires"] = expires
        if weight != 1.0:
            entry["weight"] = weight
        if admin:
            entry["admin"] = True

        def change(values: dict[str, Any]) -> None:
            if name in values:
                raise BadInputError(f"{self._path} has a user {name} already; dike users rotate makes a new token.")
            values[name] = entry

        def edits(text: str, users: list[_Pair]) -> list[_Edit]:
            before = "" if not text or text.endswith("\n") else "\n"
            return [(len(text), len(text), before + _dumped({name: entry}))]

        return self._change(change, edits, token, may_be_new=True)

    def rotate(self, name: str, *, expires: datetime.date | None = None, keeps_date: bool = False) -> Changed:
        """Replaces a user's token; the new one expires on the given or, with `keeps_date`, on the old one's last
        day.
        """
        token = new_token()
        fresh: dict[str, Any] = {"token_sha256": digest(token)}

        def change(values: dict[str, Any]) -> None:
            before = self._find(name, values)
            date = before.expires if keeps_date else expires
            if keeps_date and before.has_expired:
                raise BadInputError(
                    f"The token of {name} was valid until {date}, and so would be the new one; give --expires."
                )
            if date is not None:
                fresh["expires"] = date
            left = {key: value for key, value in values[name].items() if key not in (*_CREDENTIALS, "expires")}
            values[name] = {**fresh, **left}

        def edits(text: str, users: list[_Pair]) -> list[_Edit]:
            mapping: Any = next(value for key, value in users if key.value == name)
            pairs: dict[str, _Pair] = {key.value: (key, value) for key, value in mapping.value}
            old = next(pairs[key] for key in _CREDENTIALS if key in pairs)
            result = [_replaced(old, {"token_sha256": fresh["token_sha256"]})]
            date = {key: value for key, value in fresh.items() if key == "expires"}
            if "expires" in pairs:
                result.append(_replaced(pairs["expires"], date) if date else _removed(text, pairs["expires"]))
            elif date:
                between = ", " if mapping.flow_style else "\n" + " " * old[0].start_mark.column
                result.append((old[1].end_mark.index, old[1].end_mark.index, between + _dumped(date).strip()))
            return result

        return self._change(change, edits, token)

    def remove(self, name: str) -> Changed:
        def change(values: dict[str, Any]) -> None:
            self._find(name, values)
            if len(values) == 1:
                raise BadInputError(f"{name} is the only user in {self._path}; add another one first.")
            del values[name]

        def edits(text: str, users: list[_Pair]) -> list[_Edit]:
            return [_removed(text, next(pair for pair in users if pair[0].value == name))]

        return self._change(change, edits)

    def _find(self, name: str, values: dict[str, Any]) -> User:
        for user in validate_users(self._path, values).values():
            if user.name == name:
                return user
        raise BadInputError(f"{self._path} has no user {name}; dike users list shows those that it has.")

    def _change(
        self,
        change: Callable[[dict[str, Any]], None],
        edits: Callable[[str, list[_Pair]], list[_Edit]],
        token: str | None = None,
        *,
        may_be_new: bool = False,
    ) -> Changed:
        """Makes a change.

        Args:
            change: changes the parsed content.
            edits: the same for the text of a usual layout; used only if the result parses to the same content.
            token: the token created for the change.
            may_be_new: whether the file may be missing.
        """
        with self._locked_folder() as folder:
            before = os.stat(self._path) if self._path.exists() or not may_be_new else None
            text = "" if before is None else self._path.read_text(encoding="utf-8")
            values = parse_users(self._path, text)
            if not may_be_new or values not in (None, {}):
                validate_users(self._path, values)
            wanted: dict[str, Any] = copy.deepcopy(values) if values else {}
            change(wanted)
            validate_users(self._path, wanted)
            edited = _edited(text, edits, wanted)
            self._write(edited or _dumped(wanted), before, folder)
            return Changed(
                token,
                has_lost_comments=edited is None and bool(_COMMENT.search(text)),
                was_open=before is not None and bool(before.st_mode & OTHERS_MODE),
            )

    @contextlib.contextmanager
    def _locked_folder(self) -> Iterator[int]:
        """Locks the file's folder; turns file errors into messages."""
        try:
            folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)
                yield folder
            finally:
                os.close(folder)
        except OSError as error:
            raise BadInputError(f"The users file {self._path} cannot be changed: {error.strerror}.") from error
        except UnicodeDecodeError:
            raise BadInputError(f"The users file {self._path} is not UTF-8 text.") from None

    def _write(self, text: str, before: os.stat_result | None, folder: int) -> None:
        # NamedTemporaryFile creates files that only the owner can read.
        with tempfile.NamedTemporaryFile("w", dir=self._path.parent, encoding="utf-8", delete=False) as file:
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
                if before is not None and (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                    # The service reads it under the account that owns it.
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
                os.replace(file.name, self._path)
            except BaseException:
                os.unlink(file.name)
                raise
        os.fsync(folder)


def _edited(text: str, edits: Callable[[str, list[_Pair]], list[_Edit]], wanted: dict[str, Any]) -> str | None:
    """Applies edits to the text; None if the result does not parse to `wanted`."""
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        result = text
        for start, end, part in sorted(edits(text, [] if tree is None else tree.value), reverse=True):
            result = result[:start] + part + result[end:]
        return result if yaml.safe_load(result) == wanted else None
    except (*NOT_YAML, StopIteration):
        # For example, a user that is an alias of another.
        return None


def _replaced(pair: _Pair, values: dict[str, Any]) -> _Edit:
    key, value = pair
    return key.start_mark.index, value.end_mark.index, _dumped(values).strip()


def _removed(text: str, pair: _Pair) -> _Edit:
    start = text.rfind("\n", 0, pair[0].start_mark.index) + 1
    end = text.find("\n", _end(pair[1]))
    return start, len(text) if end < 0 else end + 1, ""


def _end(node: yaml.Node) -> int:
    """The end of a value: PyYAML reports the end of a block mapping at the next token, after any comments."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style:
        # PyYAML reports an alias at the position of its anchor, before its key; hence the maximum.
        return max(_end(part) for pair in node.value for part in pair)
    return int(node.end_mark.index)


def _dumped(values: dict[str, Any]) -> str:
    return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000))
