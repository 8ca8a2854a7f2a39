"""Tokens, members and what a machine stores about its cluster."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dike.exceptions import BadInputError, DikeError
from framework.cluster.authority import Authority
from framework.cluster.records import (
    ClusterFolder,
    Description,
    Member,
    Membership,
    fingerprint,
    parse_duration,
    parse_token,
)


@pytest.fixture
def folder(tmp_path: Path) -> ClusterFolder:
    made = ClusterFolder(tmp_path / "cluster")
    made.make()
    Authority.create(made.keys, "lab")
    return made


def test_a_token_carries_the_fingerprint_of_the_authority(folder: ClusterFolder) -> None:
    identifier, secret, expected = parse_token(folder.new_token())
    assert expected == fingerprint(folder.keys.authority.read_bytes())
    assert folder.is_valid(identifier, secret)


def test_a_token_is_valid_with_its_own_secret_only(folder: ClusterFolder) -> None:
    first, secret, _ = parse_token(folder.new_token())
    second, other, _ = parse_token(folder.new_token())
    assert not folder.is_valid(first, other)
    assert not folder.is_valid("000000", secret)
    assert folder.is_valid(second, other)


def test_a_revoked_token_is_not_valid(folder: ClusterFolder) -> None:
    identifier, secret, _ = parse_token(folder.new_token())
    folder.revoke_token(identifier)
    assert not folder.is_valid(identifier, secret)
    with pytest.raises(BadInputError, match=f"no valid token {identifier}"):
        folder.revoke_token(identifier)


def test_a_token_expires(folder: ClusterFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    identifier, secret, _ = parse_token(folder.new_token(expires_in_s=60.0))
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 61.0)
    assert not folder.is_valid(identifier, secret)
    assert folder.tokens() == {}


def test_the_secret_of_a_token_is_not_stored(folder: ClusterFolder) -> None:
    token = folder.new_token()
    _, secret, _ = parse_token(token)
    stored = b"".join(path.read_bytes() for path in folder.path.rglob("*") if path.is_file())
    assert secret.hex().encode() not in stored
    assert token.partition(".")[2].encode() not in stored


@pytest.mark.parametrize("text", ["", "abc", "7f3c9a.", "7f3c9a.X4k", "7f3c9a." + "!" * 64, "g" * 6 + "." + "A" * 64])
def test_an_incomplete_token_is_refused(text: str) -> None:
    with pytest.raises(BadInputError, match="token is incomplete"):
        parse_token(text)


def test_members_are_stored_by_name(folder: ClusterFolder) -> None:
    member = Member(2, "10.0.0.2", "ab", 1.0)
    with folder.changing_members() as members:
        members["gpu1"] = member
    assert ClusterFolder(folder.path).members() == {"gpu1": member}


def test_secrets_are_readable_by_their_owner_only(folder: ClusterFolder) -> None:
    folder.new_token()
    folder.write_membership(_membership())
    for path in folder.path.rglob("*"):
        if path.suffix in (".json", ".pem") and path.name not in ("authority.pem", "certificate.pem"):
            assert path.stat().st_mode & 0o077 == 0, path


def test_a_membership_is_read_as_it_was_written(folder: ClusterFolder) -> None:
    assert folder.membership() is None
    folder.write_membership(_membership())
    assert folder.membership() == _membership()


def test_a_damaged_membership_is_named(folder: ClusterFolder) -> None:
    (folder.path / "membership.json").write_text('{"role": "head"}')
    with pytest.raises(DikeError, match=r"membership\.json is damaged"):
        folder.membership()


@pytest.mark.parametrize(("text", "seconds"), [("30m", 1800.0), ("24h", 86400.0), ("7d", 604800.0), ("1.5h", 5400.0)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "24", "h", "-1h", "0h", "24 hours", "1e3s"])
def test_other_texts_are_no_durations(text: str) -> None:
    with pytest.raises(BadInputError, match="is not a time"):
        parse_duration(text)


def _membership() -> Membership:
    cluster = Description("lab", "127.83.201", 20000, "10.0.0.5:8690", "secret")
    return Membership("head", "box", 1, "10.0.0.5", cluster, "cpus:1", "rack:r1", listen="0.0.0.0:8690")
