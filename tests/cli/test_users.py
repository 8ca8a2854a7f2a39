"""`dike users`: who may use a service, edited by its operator."""

from __future__ import annotations

import datetime
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from framework.cli import main
from framework.service import users as users_module
from framework.service.users import TokenExpiredError, Users, digest
from framework.service.users_file import UsersFile

TODAY = datetime.date(2026, 11, 23)
OLD = "a-token-of-some-length"
BLOCK = f"""# Who may use the service.
ann:
  # From the registry's office.
  token_sha256: {digest(OLD)}  # ann's
  expires: 2026-12-31
  limits: &few
    open_jobs: 5   # not more

# The one who looks after it.
eve: {{token_sha256: {digest("eves" + OLD)}, admin: true}}
bob:
    weight: 2
    token: {OLD}-of-bob
    limits: *few
# The end.
"""

Dike = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "users.yaml"
    path.write_text(BLOCK, encoding="utf-8")
    path.chmod(0o600)
    return path


@pytest.fixture
def dike(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Dike:
    """Runs `dike users ARGUMENTS...` for the file, on a day that is always the same."""
    monkeypatch.setenv("DIKE_USERS", str(file))
    monkeypatch.setattr(users_module, "today", lambda: TODAY)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["dike", "users", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, int(end.value.code or 0), printed.out, printed.err)

    return run


def token_of(done: subprocess.CompletedProcess[str]) -> str:
    """The token that was printed, and nothing else was."""
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    return line


def refused(done: subprocess.CompletedProcess[str], said: str) -> None:
    assert (done.returncode, done.stdout) == (2, "")
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("dike: ")
    assert said in sentence


def test_a_user_is_added_with_a_token_that_is_kept_nowhere(dike: Dike, file: Path) -> None:
    token = token_of(dike("add", "carol", "--expires", "90d", "--weight", "0.5", "--admin"))
    assert len(token) >= 40
    text = file.read_text()
    assert text.startswith(BLOCK)
    assert token not in text
    user = Users.of_file(file).authenticate(token)
    assert user is not None
    assert (user.name, user.weight, user.admin) == ("carol", 0.5, True)
    assert user.expires == datetime.date(2027, 2, 21)
    assert os.listdir(file.parent) == [file.name]


def test_a_file_is_made_for_its_owner_only(dike: Dike, file: Path) -> None:
    file.unlink()
    before = os.umask(0)
    try:
        token = token_of(dike("add", "ann"))
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert yaml.safe_load(file.read_text()) == {"ann": {"token_sha256": digest(token)}}
    # A change also makes an existing file private, and prints a message if others could read it before.
    file.chmod(0o644)
    done = dike("add", "bob")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert done.stderr == f"dike: Only its owner can read {file} now; run the service as that account.\n"


@pytest.mark.parametrize("name", ["ann", "eve", "bob"])
def test_a_token_is_replaced_and_all_else_stays(dike: Dike, file: Path, name: str) -> None:
    before = yaml.safe_load(BLOCK)
    token = token_of(dike("rotate", name))
    text = file.read_text()
    after = yaml.safe_load(text)
    assert after[name].pop("token_sha256") == digest(token)
    for key in ("token", "token_sha256"):
        before[name].pop(key, None)
    assert after == before
    assert [line.partition("#")[2] for line in text.splitlines()] == [
        line.partition("#")[2] for line in BLOCK.splitlines()
    ]


@pytest.mark.parametrize("name", ["ann", "eve", "bob"])
@pytest.mark.parametrize(
    ("given", "date"), [("never", None), ("2027-01-31", datetime.date(2027, 1, 31)), ("0d", TODAY)]
)
def test_the_new_token_has_a_date_of_its_own(
    dike: Dike, file: Path, name: str, given: str, date: datetime.date | None
) -> None:
    token = token_of(dike("rotate", name, "--expires", given))
    text = file.read_text()
    user = Users.of_file(file).authenticate(token)
    assert user is not None
    assert (user.name, user.expires) == (name, date)
    assert {"# Who may use the service.", "# From the registry's office.", "# The end."} <= {
        line.strip() for line in text.splitlines()
    }
    others = {other: entry for other, entry in yaml.safe_load(text).items() if other != name}
    assert others == {other: entry for other, entry in yaml.safe_load(BLOCK).items() if other != name}


def test_a_token_that_has_expired_is_not_replaced_by_one_that_has(
    dike: Dike, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(users_module, "today", lambda: datetime.date(2027, 1, 1))
    with pytest.raises(TokenExpiredError):
        Users.of_file(file).authenticate(OLD)
    refused(dike("rotate", "ann"), "The token of ann was valid until 2026-12-31, and so would be the new one")
    assert file.read_text() == BLOCK
    token_of(dike("rotate", "ann", "--expires", "2027-12-31"))


def test_a_user_is_taken_out_with_nothing_else(dike: Dike, file: Path) -> None:
    for name in ("eve", "bob"):
        done = dike("remove", name)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    text = file.read_text()
    assert text == BLOCK[: BLOCK.index("eve:")] + "# The end.\n"
    refused(dike("remove", "ann"), f"ann is the only user in {file}; add another one first")
    assert file.read_text() == text


def test_what_cannot_be_changed_in_its_place_is_written_anew_and_that_is_said(dike: Dike, file: Path) -> None:
    # bob's limits are an alias of ann's, so they remain when ann is removed.
    done = dike("remove", "ann")
    assert (done.returncode, done.stderr) == (0, f"dike: {file} was rewritten without its comments.\n")
    before = yaml.safe_load(BLOCK)
    del before["ann"]
    assert yaml.safe_load(file.read_text()) == before
    file.write_text(f"{{ann: {{token: {OLD}}}, bob: &all {{token: {OLD}2}}}}")
    token = token_of(dike("add", "carol"))
    token_of(dike("rotate", "ann", "--expires", "7d"))
    assert yaml.safe_load(file.read_text())["carol"] == {"token_sha256": digest(token)}
    assert {user.name for user in UsersFile(file).users()} == {"ann", "bob", "carol"}


def test_the_users_are_shown_without_their_tokens(dike: Dike, file: Path) -> None:
    assert dike("add", "dan", "--no-token").stdout == ""
    done = dike("list", "--format", "json")
    shown: dict[str, Any] = {user["name"]: user for user in json.loads(done.stdout)["users"]}
    nothing = {"open_jobs": None, "trials": None, "output_bytes": None, "bundle_bytes": None, "priority": "high"}
    assert list(shown) == ["ann", "eve", "bob", "dan"]
    assert shown["ann"] == {
        "name": "ann",
        "weight": 1.0,
        "admin": False,
        "has_token": True,
        "expires": "2026-12-31",
        "has_expired": False,
        "limits": {**nothing, "open_jobs": 5},
    }
    assert (shown["dan"]["has_token"], shown["dan"]["limits"]) == (False, nothing)
    table = dike("list").stdout
    for part in ("valid until 2026-12-31", "5 open jobs", "none: signed in by a proxy", "Users"):
        assert part in table
    for text in (done.stdout, table):
        assert OLD not in text
        assert digest(OLD) not in text
    # A user without a token can get one.
    token_of(dike("rotate", "dan", "--expires", "1d"))
    assert "expired after" not in dike("list").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("add", "ann"), "has a user ann already; dike users rotate makes a new token"),
        (("add", "a b"), "'a b' cannot be a user's name"),
        (("add", "dan", "--weight", "0"), "--weight is 0; it must be above 0"),
        (("add", "dan", "--weight", "nan"), "--weight is nan; it must be"),
        (("add", "dan", "--expires", "soon"), "'soon' is not a value of --expires"),
        (("add", "dan", "--expires", "99999d"), "'99999d' is not a value of --expires"),
        (("add", "dan", "--expires", "never"), "'never' is not a value of --expires"),
        (("add", "dan", "--expires", "2026-11-22"), "--expires 2026-11-22 is in the past"),
        (("add", "dan", "--expires", "1d", "--no-token"), "--no-token creates none"),
        (("rotate", "dan"), "has no user dan; dike users list shows those that it has"),
        (("rotate", "ann", "--expires", "2027-02-30"), "'2027-02-30' is not a value of --expires"),
        (("remove", "dan"), "has no user dan"),
        (("list", "--users", "/nowhere/users.yaml"), "cannot be read: No such file"),
        (("add", "dan", "--users", "/nowhere/users.yaml"), "cannot be changed: No such file"),
        (("remove", "ann", "--users", "/nowhere.yaml"), "cannot be changed: No such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(
    dike: Dike, file: Path, arguments: tuple[str, ...], said: str
) -> None:
    refused(dike(*arguments), said)
    assert file.read_text() == BLOCK


@pytest.mark.parametrize("text", ["a: {token: short}", "a: [", "[]", "a: {limits: {}}", "\udce9"])
def test_a_file_that_is_wrong_is_not_touched(dike: Dike, file: Path, text: str) -> None:
    file.write_bytes(text.encode(errors="surrogateescape"))
    for command in ("add", "rotate", "remove"):
        refused(dike(command, "a"), f"The users file {file}")
    assert file.read_bytes() == text.encode(errors="surrogateescape")


def test_what_cannot_be_written_leaves_the_file_as_it_was(
    dike: Dike, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    refused(dike("rotate", "ann"), "cannot be changed: No space left on device")
    assert file.read_text() == BLOCK
    assert os.listdir(file.parent) == [file.name]


def test_a_file_that_a_link_leads_to_is_changed_itself(dike: Dike, file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.yaml"
    link.symlink_to(file)
    token_of(dike("add", "carol", "--users", str(link)))
    assert link.is_symlink()
    assert "carol" in file.read_text()


def test_operators_who_add_users_at_once_lose_none(file: Path) -> None:
    threads = [threading.Thread(target=UsersFile(file).add, args=(f"user-{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {f"user-{number}" for number in range(8)} <= {user.name for user in UsersFile(file).users()}
