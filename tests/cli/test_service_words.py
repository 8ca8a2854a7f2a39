"""What the commands of a service say where no service is needed for it."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dike.exceptions import InterruptedByUserError
from dike.profile import Api
from framework.cli import main
from framework.cli.following import last_lines
from framework.cli.job_tables import last_events
from framework.project import profiling
from framework.project.tensorflow_noise import is_noise
from framework.scheduler.records import OutputChunk
from framework.service.api.backend import Proxy
from framework.service.api.front import ApiFront
from framework.service.api.schemas import EventView
from framework.service.requests import read_request
from framework.service.serve import ServeRequest
from framework.service.users import own_token
from tests.training.job_stage import profile

PRINTED = ("one\ntwo\nth", "ree\n", "four\nfi", "ve")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands are given, with a script."""
    (tmp_path / "train.py").write_text("import sys; print('hello', sys.argv)")
    (tmp_path / "profile.json").write_text(profile(Api.GRAPH).dumps())
    monkeypatch.chdir(tmp_path)
    for name in ("DIKE_MASTER", "DIKE_STATE", "DIKE_STORAGE", "DIKE_USERS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def dike(command: str) -> int:
    """Gives a command; its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["dike", *command.split()])
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
    return 0


@pytest.mark.integration
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("submit --nope train.py", "There is no option --nope; see dike submit --help."),
        ("submit --nope=3 train.py", "There is no option --nope; see dike submit --help."),
        ("run --nope train.py", "There is no option --nope; see dike run --help."),
        ("submit --env =A train.py", "'=A' is not a value of --env; write NAME=VALUE, or NAME for its value here."),
        ("submit --env NOT_SET_HERE train.py", "NOT_SET_HERE here, which is not set; write NOT_SET_HERE=VALUE."),
        ("run --master a:1 --agents 3 train.py", "--agents is for a private Mesos"),
        ("tune --master a:1 --attributes rack:r1 train.py", "--attributes is for a private Mesos"),
        ("serve --master a:1 --agents 3 --resources cpus:1", "--agents, --resources is for a private Mesos"),
        ("serve --listen 127.0.0.1:0 --state sqlite:///none/x.db", "folder none of the database does not exist"),
        ("submit --name a/b train.py", "'a/b' is not a name for a job; use up to 200 letters, digits"),
        ("tune --resume rv --detach --slots 1 train.py", "with its first options; leave out --slots, the script"),
        ("tune --resume rv --detach --storage sqlite:///x.db", "With --detach the service chooses where"),
        (
            "tune --resume rv --service http://127.0.0.1:1",
            "--service is for a search that a service runs; add --detach",
        ),
        ("tune --token-file t --param lr=1 train.py", "--token-file is for a search that a service runs; add --detach"),
        ("tune --priority high --param lr=1 train.py", "--priority is for a search that a service runs; add --detach"),
        ("tune --hold --param lr=1 train.py", "--hold is for a search that a service runs; add --detach"),
        ("tune --budget 5 --param lr=1 train.py", "--budget is '5'; write hours of GPUs or CPUs, such as 40gpuh"),
        ("tune --on-failure retry --param lr=1 train.py", "write continue, abort, retry=N or larger-gpu"),
        ("tune --mlflow sqlite:///x.db --detach --param lr=1 train.py", "leave out --mlflow"),
        ("submit --array 3-1 train.py", "--array is '3-1'; a range begins with its smallest number"),
        ("submit --array a train.py", "--array is 'a'; write numbers and ranges, such as 0-9, 0-90:10 or 1,3,5-7."),
        ("submit --array 0-1000 train.py", "--array has more than 1000 numbers."),
        ("submit --array 0-1 --wait train.py", "--array submits several jobs; leave out --wait"),
        ("submit --time-limit 5x train.py", "'5x' is no duration; write seconds, or such as 90m, 1h30m, 2d or"),
        ("submit --time-limit 0s train.py", "--time-limit is 0.0; it must be at least 1."),
        ("submit --after prepare:maybe train.py", "--after is 'prepare:maybe'; write NAME, NAME:any or NAME:failed."),
        ("tune --follow --param lr=1 train.py", "--wait and --follow are for a search that a service runs (--detach)"),
        (
            "tune --env =A --param lr=1 train.py",
            "'=A' is not a value of --env; write NAME=VALUE, or NAME for its value",
        ),
        ("tune --resume rv --detach --env A=b", "with its first options; leave out --env"),
        ("tune --resume rv --detach --volume /data", "with its first options; leave out --volume"),
        ("tune --image x --master a:1 --param lr=1 train.py", "--image needs --checkpoint-dir"),
        ("tune --image x --volume /data:ro --master a:1 --param lr=1 train.py", "--image needs --checkpoint-dir"),
        ("tune --volume /data --param lr=1 train.py", "--volume needs --image"),
        ("run --volume /data --profile profile.json train.py", "--volume needs --image"),
        ("submit --volume data train.py", "'data' cannot be mounted in a container"),
        ("serve --allow-volume /data", "--allow-volume needs --image"),
        ("serve --image x --master a:1 --allow-volume /data:/mnt", "write FOLDER or FOLDER:ro"),
        ("serve --image x --master a:1 --allow-volume /a --allow-volume /a/b:ro", "/a/b lies in /a, which jobs can"),
        ("serve --proxy-user-header X-User --users u.yaml", "--proxy-user-header and --proxy-address need each other"),
        ("serve --proxy-address 10.0.0.5 --users u.yaml", "--proxy-user-header and --proxy-address need each other"),
        ("serve --proxy-user-header X-User --proxy-address 10.0.0.5", "--proxy-user-header needs --users"),
        ("serve --proxy-user-header X-User --proxy-address proxy --users u.yaml", "--proxy-address proxy is neither"),
        ("serve --users u.yaml", "The users file u.yaml cannot be read: No such file or directory."),
        ("serve --sample-runs 3", "--sample-runs has no effect without --allocation; name a policy: dike, optimus"),
        ("serve --keep-checkpoints 30", "'30' is not a value of --keep-checkpoints: a time is a number with d, h"),
        ("serve --keep-checkpoints 0d", "--keep-checkpoints 0 would delete checkpoints that jobs resume from"),
        ("serve --keep-checkpoints 31d --listen 127.0.0.1:0", "--keep-checkpoints is longer than --keep"),
        ("run --advertise-address here train.py", "--advertise-address needs --master"),
        ("serve --master a:1 --advertise-address http://x", "'http://x' is not a value of --advertise-address"),
        ("run --master a:1 --advertise-address [::1] train.py", "write a host name or an IPv4 address"),
        ("tune --resume rv", "resume it with dike tune --resume NAME --detach"),
        ("trials rv", "see dike jobs NAME"),
        ("timeline rv", "see dike jobs NAME"),
    ],
)
def test_what_is_refused(command: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert dike(command) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("dike: ")
    assert said in last
    assert "--storage" not in last or "serve" not in command


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--max-restarts 1001", "--max-restarts is 1001; it must be at most 1,000."),
        ("--max-workers 10001", "--max-workers is 10001; it must be at most 10,000."),
        ("--checkpoint-interval 1e10", "--checkpoint-interval is 10000000000.0; it must be at most"),
        (f"--env X={'x' * 5000}", "environment.X has 5,000 characters; it can have at most 4,096"),
        ("--env X=\udcff", "environment.X is not valid UTF-8"),
        ("--env \udcff=x", "environment."),
        ("--volume /\udcff", "--volume is not valid UTF-8"),
        ("--checkpoint-dir /nowhere/\udcff", "--checkpoint-dir is not valid UTF-8"),
    ],
)
def test_what_no_service_takes(options: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert dike(f"submit {options} --profile profile.json --save saved train.py") == 2
    assert capfd.readouterr().err.startswith(f"dike: {said}")
    assert dike("submit --profile profile.json --save saved train.py \udcff") == 2
    assert capfd.readouterr().err.startswith("dike: arguments.0 is not valid UTF-8")


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[ServeRequest]:
    """Services that would have been run; each ends as soon as clients could reach it."""
    asked: list[ServeRequest] = []

    def serve(request: ServeRequest, front: Any, note: object) -> None:
        asked.append(request)
        with front(None, None, None):
            pass

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("framework.service.serve.serve", serve)
    monkeypatch.setattr(ApiFront, "__call__", lambda *_: contextlib.nullcontext())
    return asked


@pytest.mark.integration
def test_who_starts_a_service_on_a_terminal_is_shown_how_to_sign_in(
    services: list[ServeRequest],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    command = "serve --listen 127.0.0.1:0 --advertise https://dike.example.org/here/"
    assert dike(command) == 0
    token = own_token()
    assert token not in capfd.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(sys.stderr, "isatty", lambda: True)
        assert dike(command) == 0
        printed = capfd.readouterr()
        assert f"dike: sign in at https://dike.example.org/here/#token={token}\n" in printed.err
        assert token not in printed.out
        assert len(services) == 2
        # The log file does not contain the token. With several users, no user's token is printed.
        assert "web page at https://dike.example.org/here/" in caplog.text
        assert token not in caplog.text
        (tmp_path / "users.yaml").write_text(f"ann: {{token: {token}}}")
        (tmp_path / "users.yaml").chmod(0o600)
        assert dike(f"{command} --users users.yaml") == 0
        assert token not in capfd.readouterr().err
        # The file may be named by the environment.
        patch.setenv("DIKE_USERS", "users.yaml")
        assert dike(command) == 0
        assert "sign in at" not in capfd.readouterr().err


@pytest.mark.integration
def test_a_service_knows_what_its_users_file_and_options_say(
    services: list[ServeRequest], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fronts: list[ApiFront] = []
    monkeypatch.setattr(ApiFront, "__call__", lambda front, *_: contextlib.nullcontext(fronts.append(front)))
    users = f"ann: {{token_sha256: {'a' * 64}, weight: 3, limits: {{open_jobs: 7}}}}"
    (tmp_path / "users.yaml").write_text(users)
    proxy = "--proxy-user-header X-User --proxy-address 10.0.0.5 --proxy-address fd00::/64"
    assert dike(f"serve --listen 127.0.0.1:0 --users users.yaml {proxy}") == 0
    (request,), (front,) = services, fronts
    assert (request.weight("ann"), request.limits("ann").open_jobs) == (3.0, 7)
    assert front._proxy == Proxy.of("X-User", ["10.0.0.5", "fd00::/64"])


def test_a_service_named_by_the_environment_is_not_in_the_way(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DIKE_SERVICE", "http://127.0.0.1:1")
    assert dike("tune --resume rv") == 2
    assert "There is no database of searches" in capfd.readouterr().err


def test_what_is_saved_for_the_page_is_named(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = "--profile profile.json --env A=b=c --env D= --volume /data:ro --isolate-tasks"
    assert dike(f"submit {options} --save saved train.py") == 0
    said = capfd.readouterr().out
    for name in ("request.json", "bundle.tar.gz"):
        assert f"wrote saved/{name}" in said
        assert (folder / "saved" / name).stat().st_size
    text = (folder / "saved" / "request.json").read_text()
    assert '"A": "b=c"' in text
    assert '"D": ""' in text
    assert '"/data:ro"' in text
    request = read_request(json.loads(text))
    assert request.isolate_tasks
    assert request.to_spec(job_id="job", checkpoint_dir="", bundle_url="", python="").isolate_tasks


def test_ctrl_c_while_the_script_is_read(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    monkeypatch.setattr(profiling._ProfilingProcess, "profile", interrupted)
    assert dike("submit --save saved train.py") == InterruptedByUserError.exit_code
    said = capfd.readouterr().err.splitlines()
    assert said == ["dike: reading the model of train.py", "dike: Interrupted; nothing was submitted."]


@pytest.mark.parametrize(
    ("count", "left"), [(0, ""), (1, "five"), (2, "four\nfive"), (3, "three\nfour\nfive"), (9, "".join(PRINTED))]
)
def test_the_last_lines_of_an_output(count: int, left: str) -> None:
    chunks = [OutputChunk(number, "worker:0", "stdout", text) for number, text in enumerate(PRINTED)]
    assert "".join(chunk.text for chunk in last_lines(chunks, count)) == left


def test_the_last_lines_are_whole_and_worth_reading() -> None:
    noise = "I0000 00:00:1700000000.000000   1 port.cc:153] oneDNN custom operations are on.\n"
    pieces = [("worker:0", "stdout", "a"), ("worker:1", "stdout", "b\nc"), ("worker:0", "stdout", "a\n")]
    chunks = [OutputChunk(1, "worker:0", "stderr", f"x\n{noise}"), *(OutputChunk(2, *piece) for piece in pieces)]
    told = [(chunk.task, chunk.text) for chunk in last_lines(chunks, 4)]
    assert is_noise(noise.encode())
    assert told == [("worker:0", "x\n"), ("worker:1", "b\n"), ("worker:0", "aa\n"), ("worker:1", "c")]
    assert not last_lines([], 3)


def test_of_checkpoints_that_follow_one_another_the_newest_is_shown() -> None:
    kinds = ["planned", "checkpoint", "checkpoint", "task", "checkpoint", "checkpoint", "checkpoint"]
    events = [EventView(number=number, time_s=0.0, kind=kind, text="") for number, kind in enumerate(kinds)]
    assert [event.number for event in last_events(events, 20)] == [0, 2, 3, 6]
    assert [event.number for event in last_events(events, 2)] == [3, 6]
