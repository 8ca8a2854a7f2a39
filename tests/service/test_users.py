"""Users files, the personal token, authentication."""

from __future__ import annotations

import datetime
import hashlib
import logging
import signal
import threading
from pathlib import Path

import pytest

from dike.exceptions import BadInputError
from framework.service import users as users_module
from framework.service.users import TokenExpiredError, User, UserLimits, Users, digest, own_token
from framework.user_folders import own_token_file
from tests.waiting import wait_until

TOKEN = "a-token-of-some-length"
OTHER = "another-token-of-some-length"
SECRET = "do-not-show-me-anywhere"


def sha256(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def test_tokens_are_known_by_their_digest_or_themselves(tmp_path: Path) -> None:
    path = write(
        tmp_path / "users.yaml",
        f"alice: {{token_sha256: {sha256(TOKEN)}, weight: 2, admin: true}}\nb.o-b@x: {{token: {OTHER}}}\n",
    )
    users = Users.of_file(path)
    assert users.authenticate(TOKEN) == User("alice", 2.0, admin=True)
    assert users.authenticate(OTHER) == User("b.o-b@x", 1.0, admin=False)
    for wrong in ("", TOKEN[:-1], TOKEN + "x", sha256(TOKEN), "ä\ud800"):
        assert users.authenticate(wrong) is None
    assert (users.weight("alice"), users.weight("gone")) == (2.0, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "at the whole: Input should be a valid dictionary"),
        ("[]", "valid dictionary"),
        ("{}", "at least 1"),
        ("a: {", "is not YAML"),
        (f"a: {{token: {SECRET}", "is not YAML"),
        ("a: !!python/object/apply:os.getcwd []", "is not YAML"),
        (f"a: {{token: {SECRET}, weight: 2024-13-45}}", "is not YAML"),
        (f"a: {{token: {SECRET}, weight: !!timestamp foo}}", "is not YAML"),
        (f"a: {{token: {SECRET}, admin: !!bool x}}", "is not YAML"),
        (f"a: {{token: {SECRET}, weight: !!int ''}}", "is not YAML"),
        (f"a: {{token: {SECRET}, weight: 1{':1' * 200}.5}}", "is not YAML"),
        ("[" * 5000, "is not YAML"),
        ("a: {}", "give either token_sha256 or token"),
        (f"a: {{token: {SECRET}, token_sha256: {'a' * 64}}}", "give either token_sha256 or token"),
        ("a: {token: short}", "at a.token: String should have at least 16"),
        (f"a: {{token: '{SECRET} '}}", "at a.token"),
        (f"a: {{token_sha256: {SECRET}}}", "at a.token_sha256"),
        (f"a: {{token: {SECRET}, weight: 0}}", "at a.weight"),
        (f"a: {{token: {SECRET}, weight: .inf}}", "at a.weight"),
        (f"a: {{token: {SECRET}, wieght: 1}}", "at a.wieght"),
        (f"'a b': {{token: {SECRET}}}", "at a b"),
        (f"a: {{token: {SECRET}}}\nb: {{token: {SECRET}}}", "gives a and b the same token"),
        (f"a: {{token: {SECRET}}}\na: {{token: {SECRET}1}}", "line 2: duplicate key 'a'"),
    ],
)
def test_a_users_file_that_is_wrong_is_refused_without_showing_a_token(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path / "users.yaml", text)
    with pytest.raises(BadInputError) as raised:
        Users.of_file(path)
    message = str(raised.value)
    assert said in message
    assert str(path) in message
    assert SECRET not in message
    assert "\n" not in message


def test_plain_tokens_must_not_be_readable_by_others(tmp_path: Path) -> None:
    for mode in (0o644, 0o640, 0o602):
        path = write(tmp_path / "users.yaml", f"a: {{token: {TOKEN}}}", mode)
        with pytest.raises(BadInputError, match="chmod 600"):
            Users.of_file(path)
    # Digests may be read.
    path = write(tmp_path / "users.yaml", f"a: {{token_sha256: {sha256(TOKEN)}}}", 0o644)
    assert Users.of_file(path).authenticate(TOKEN) is not None
    with pytest.raises(BadInputError, match="cannot be read: No such file"):
        Users.of_file(tmp_path / "none.yaml")


def test_users_are_read_again_and_a_mistake_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "users.yaml", f"a: {{token: {TOKEN}}}")
    users = Users.of_file(path)
    write(path, f"b: {{token: {OTHER}}}")
    users.reload()
    assert (users.authenticate(TOKEN), users.authenticate(OTHER)) == (None, User("b"))
    for mistake in ("rubbish", f"b: {{token: {OTHER}, weight: !!timestamp foo}}"):
        write(path, mistake)
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            users.reload()
        assert users.authenticate(OTHER) == User("b")
        assert "users not reloaded" in caplog.text


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert own_token_file().is_relative_to(tmp_path)
    return own_token_file()


def test_an_account_gets_a_token_of_its_own_once(config: Path) -> None:
    users = Users.of_this_account()
    token = own_token()
    assert config.stat().st_mode & 0o777 == 0o600
    user = users.authenticate(token)
    assert user is not None
    assert user.admin
    assert own_token() == token
    assert list(config.parent.iterdir()) == [config]


def test_two_processes_that_start_together_get_the_same_token(config: Path) -> None:
    tokens: list[str] = []
    threads = [threading.Thread(target=lambda: tokens.append(own_token())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tokens) == 8
    assert len(set(tokens)) == 1


def test_a_token_file_that_cannot_be_used_is_named(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.parent.mkdir(parents=True)
    write(config, f"{TOKEN}\n", 0o644)
    with pytest.raises(BadInputError, match=f"Others may read the token in {config}"):
        own_token()
    write(config, "\n")
    with pytest.raises(BadInputError, match="holds no token"):
        own_token()
    config.write_bytes(b"\xff\n")
    with pytest.raises(BadInputError, match="it is not text"):
        own_token()
    config.unlink()
    (config.parent / "file").touch()
    monkeypatch.setattr(users_module, "own_token_file", lambda: config.parent / "file" / "token")
    with pytest.raises(BadInputError, match="cannot be used: "):
        own_token()


def test_every_token_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {digest(name * 20): User(name) for name in "abc"}
    compared: list[str] = []
    monkeypatch.setattr("hmac.compare_digest", lambda one, other: compared.append(one) or one == other)
    assert Users(lambda: names).authenticate("a" * 20) == User("a")
    assert compared == list(names)


def test_a_service_reads_its_users_again_on_hangup(tmp_path: Path) -> None:
    path = write(tmp_path / "users.yaml", f"a: {{token: {TOKEN}}}")
    users = Users.of_file(path)
    before = signal.getsignal(signal.SIGHUP)
    with users.auto_reload():
        write(path, f"b: {{token: {OTHER}}}")
        signal.raise_signal(signal.SIGHUP)
        assert users.authenticate(OTHER) == User("b")
    assert signal.getsignal(signal.SIGHUP) is before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (f"{{token: {SECRET}, limits: 5}}", "at a.limits: Input should be a valid dictionary"),
        (f"{{token: {SECRET}, limits: {{open_job: 5}}}}", "at a.limits.open_job"),
        (f"{{token: {SECRET}, limits: {{open_jobs: -1}}}}", "at a.limits.open_jobs"),
        (f"{{token: {SECRET}, limits: {{open_jobs: yes}}}}", "at a.limits.open_jobs"),
        (f"{{token: {SECRET}, limits: {{open_jobs: '5'}}}}", "at a.limits.open_jobs"),
        (f"{{token: {SECRET}, limits: {{trials: 1.5}}}}", "at a.limits.trials"),
        (f"{{token: {SECRET}, limits: {{trials: }}}}", "at a.limits.trials: there is no value"),
        (f"{{token: {SECRET}, limits: {{output: much}}}}", "at a.limits.output: a size is a number of bytes or text"),
        (f"{{token: {SECRET}, limits: {{output: .inf}}}}", "at a.limits.output: a size is"),
        (f"{{token: {SECRET}, limits: {{output: .nan}}}}", "at a.limits.output: "),
        (f"{{token: {SECRET}, limits: {{bundles: -5}}}}", "at a.limits.bundles"),
        (f"{{token: {SECRET}, expires: tomorrow}}", "at a.expires: a date is written like 2027-01-31"),
        (f"{{token: {SECRET}, expires: 20270131}}", "at a.expires: a date is written like"),
        (f"{{token: {SECRET}, expires: 2027-01-31T10:00:00}}", "at a.expires: a date is written like"),
        (f"{{token: {SECRET}, no_token: true}}", "at a: give either token_sha256 or token, or no_token: true"),
        ("{no_token: true, expires: 2027-01-31}", "at a: there is no token that expires"),
    ],
)
def test_limits_and_dates_that_are_wrong_are_refused(tmp_path: Path, entry: str, said: str) -> None:
    path = write(tmp_path / "users.yaml", f"a: {entry}")
    with pytest.raises(BadInputError) as raised:
        Users.of_file(path)
    message = str(raised.value)
    assert f"The users file {path} is wrong {said}" in message
    assert message.endswith(
        "it maps names to token_sha256, expires, weight, admin and limits (open_jobs, trials, output, bundles)."
    )
    assert SECRET not in message
    assert "\n" not in message


def test_a_user_may_have_as_much_as_the_file_says(tmp_path: Path) -> None:
    limits = "{open_jobs: 5, trials: 0, output: 2MiB, bundles: 1000}"
    path = write(tmp_path / "users.yaml", f"a: {{token: {TOKEN}, limits: {limits}}}\nb: {{token: {OTHER}}}")
    users = Users.of_file(path)
    assert users.limits("a") == UserLimits(open_jobs=5, trials=0, output_bytes=2 * 2**20, bundle_bytes=1000)
    assert users.limits("b") == users.limits("gone") == UserLimits()


def test_a_token_is_valid_until_the_end_of_its_last_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "users.yaml", f"a: {{token: {TOKEN}, expires: 2027-01-31}}\nb: {{token: {OTHER}}}")
    users = Users.of_file(path)
    monkeypatch.setattr(users_module, "today", lambda: datetime.date(2027, 1, 31))
    assert users.authenticate(TOKEN) == User("a", expires=datetime.date(2027, 1, 31))
    monkeypatch.setattr(users_module, "today", lambda: datetime.date(2027, 2, 1))
    with pytest.raises(TokenExpiredError, match=r"^This token was valid until 2027-01-31; .* gives a a new one\.$"):
        users.authenticate(TOKEN)
    assert users.authenticate(OTHER) == User("b")


def test_users_without_a_token_are_known_by_name_only(tmp_path: Path) -> None:
    path = write(tmp_path / "users.yaml", "a: {no_token: true, weight: 3}\nb: {no_token: true}\n")
    users = Users.of_file(path)
    assert users.named("a") == User("a", 3.0, has_token=False)
    assert users.named("c") is None
    assert all(users.authenticate(guess) is None for guess in ("", "a", "None"))


def test_a_service_notices_that_its_users_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(users_module, "CHECK_INTERVAL_S", 0.01)
    path = write(tmp_path / "users.yaml", f"a: {{token: {TOKEN}}}")
    users = Users.of_file(path)

    def put(text: str, mode: int = 0o600) -> None:
        # Replaced atomically: a partial file would be reported as an error.
        write(tmp_path / "new.yaml", text, mode).replace(path)

    looks: list[object] = []
    look = users._fingerprint
    monkeypatch.setattr(users, "_fingerprint", lambda: looks.append(None) or look())
    with users.auto_reload():
        put(f"b: {{token: {OTHER}}}")
        wait_until(lambda: users.authenticate(OTHER), "another user")
        assert users.authenticate(TOKEN) is None
        # What cannot be read changes nothing, and neither does it end the looking.
        path.unlink()
        wait_until(lambda: "users not reloaded" in caplog.text, "the loss of the file")
        # Said once, and not each time that is looked.
        seen = len(looks)
        wait_until(lambda: len(looks) > seen + 3, "more looks")
        assert caplog.text.count("users not reloaded") == 1
        put(f"c: {{token: {TOKEN}}}", 0o644)
        wait_until(lambda: "chmod 600" in caplog.text, "a mode that is refused")
        assert users.authenticate(OTHER) == User("b")
        path.chmod(0o600)
        wait_until(lambda: users.authenticate(TOKEN), "the third user")
    assert users.authenticate(TOKEN) == User("c")
