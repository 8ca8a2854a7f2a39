"""What must not be seen is looked for wherever others may look, around a real job on a real Mesos."""

from __future__ import annotations

import ast
import base64
import contextlib
import dataclasses
import gzip
import io
import os
import queue
import re
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import psutil
import pytest

from dike.exceptions import BadInputError
from executor import bundle as executor_bundle
from framework.embedded.cluster import EmbeddedCluster
from framework.project.bundle import BundleServer, check, pack
from framework.scheduler.records import JobState
from framework.service.requests import read_request
from framework.service.store import ServiceStore
from framework.service.submission import Submissions
from tests.training.job_stage import profile
from tests.waiting import DEADLINE_S, wait_until

ROOT = Path(__file__).parents[2]
API_KEY = "key-of-the-user-0815"
PASSWORD = "password-of-the-database-99"
SCRIPT = """
import os, time
print("hello", flush=True)
while not os.path.exists({go!r}):
    time.sleep(0.05)
"""


def traces(secret: str) -> list[bytes]:
    """The secret as such, and what base64 makes of it at any place in a longer text."""
    found = [secret.encode()]
    for offset in range(3):
        encoded = base64.b64encode(b"\0" * offset + secret.encode())
        found.append(encoded[4 if offset else 0 : -4])
    return found


@dataclasses.dataclass(frozen=True)
class Look:
    """Everything that others can see: file, process or address -> content."""

    seen: dict[str, bytes]

    def places(self, secret: str) -> set[str]:
        assert len(self.seen) > 10, "nothing has been looked at"
        return {place for place, content in self.seen.items() if any(trace in content for trace in traces(secret))}


def files(folder: Path) -> Iterator[tuple[str, bytes]]:
    # Sandboxes' temporary files and folders come and go; `Path.rglob` fails where a folder does.
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file() and not path.is_symlink():
                    yield str(path.relative_to(folder)), path.read_bytes()


def processes(service: psutil.Process, cluster: EmbeddedCluster) -> Iterator[tuple[str, bytes]]:
    supervisor = psutil.Process(cluster.supervisor_pid)
    for process in (service, supervisor, *supervisor.children(recursive=True)):
        # So do the processes that look after containers.
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            found = {part: Path(f"/proc/{process.pid}/{part}").read_bytes() for part in ("cmdline", "environ")}
            # Asked last: what begins a script meanwhile has the script's environment from then on.
            name = "script" if "dike.launch" in process.cmdline() else "other"
            for part, content in found.items():
                yield f"{name} {process.pid} {part}", content


def answers(cluster: EmbeddedCluster) -> Iterator[tuple[str, bytes]]:
    addresses = [f"{cluster.master}/{path}" for path in ("state", "tasks", "frameworks", "slaves")]
    host = cluster.access.address
    addresses += [f"{host}:{agent.port}/{path}" for agent in cluster.agents for path in ("state", "containers")]
    for address in addresses:
        answer = httpx.get(f"http://{address}", auth=cluster.access.credentials, timeout=DEADLINE_S, trust_env=False)
        assert answer.is_success
        yield address, answer.content


def has_ended(store: ServiceStore, job_id: str) -> bool:
    job = store.job(job_id)
    return job is not None and job.state.has_ended()


def written(store: ServiceStore, job_id: str) -> str:
    return "".join(chunk.text for chunk in store.history.output(job_id))


@pytest.mark.mesos
def test_no_secret_is_where_others_can_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIKE_STATE", f"postgresql://dike:{PASSWORD}@localhost/dike")
    mesos, logs, go = tmp_path / "mesos", tmp_path / "logs", tmp_path / "go"
    logs.mkdir()
    (tmp_path / "project").mkdir()
    script = tmp_path / "project" / "train.py"
    script.write_text(SCRIPT.format(go=str(go)))
    url = f"sqlite:///{tmp_path}/service.db"
    request = {
        "script": "train.py",
        "profile": profile().to_json(),
        "checkpoint_dir": str(tmp_path / "checkpoints"),
        "max_workers": 1,
        "environment": {"API_KEY": API_KEY},
    }
    with (
        closing(ServiceStore(url)) as store,
        EmbeddedCluster(work_dir=mesos) as cluster,
        (logs / "output").open("wb") as output,
    ):
        job = Submissions(store, queue.SimpleQueue()).submit(
            read_request({"kind": "training", **request}), pack(script), "ann"
        )
        command = [sys.executable, "-m", "tests.service.serving_script", url, cluster.master]
        secret_file = cluster.access.secret_file
        command += ["--principal", "dike", "--secret-file", str(secret_file), "--log", str(logs / "log")]
        with subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output) as service:
            try:
                wait_until(lambda: has_ended(store, job.id) or "hello" in written(store, job.id), "a first line")
                running = Look(
                    {
                        **dict(answers(cluster)),
                        **dict(processes(psutil.Process(service.pid), cluster)),
                        **dict(files(mesos)),
                    }
                )
                go.touch()
                wait_until(lambda: has_ended(store, job.id), "the end")
            finally:
                service.kill()
        now = store.job(job.id)
        assert now is not None
        assert (now.state, now.failure) == (JobState.FINISHED, "")
        after = Look({**dict(files(mesos)), **dict(files(logs))})
    for secret, known_to in (
        (cluster.access.secret, {"credentials.json"}),  # Mode 600: `test_only_its_own_account_reads_its_secret`.
        (job.bundle_token, set()),
    ):
        assert running.places(secret) == known_to
        assert after.places(secret) == known_to
    # What users give their scripts is in the scripts' own environment, which only their account can read.
    assert {place.partition(" ")[0] for place in running.places(API_KEY)} == {"script"}
    assert after.places(API_KEY) == set()
    assert not any(place.startswith("script") for place in running.places(PASSWORD))
    for path in tmp_path.glob("service.db*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


# Bundles that a user has crafted.


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    return member, b""


def bomb(content_bytes: int) -> bytes:
    header = tarfile.TarInfo("train.py")
    header.size = content_bytes
    return gzip.compress(header.tobuf() + b"\0" * content_bytes, compresslevel=1)


def said_to_hold(content_bytes: int) -> bytes:
    """A file's header, and nothing behind it."""
    header = tarfile.TarInfo("train.py")
    header.size = content_bytes
    return gzip.compress(header.tobuf())


def sparse() -> bytes:
    header = tarfile.TarInfo("train.py")
    header.type = tarfile.GNUTYPE_SPARSE
    return gzip.compress(header.tobuf(tarfile.GNU_FORMAT) + bytes(1024))


def prefixed(kind: bytes, content: bytes, count: int = 1) -> bytes:
    """The script behind headers that belong to it, each with this content."""
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = kind, len(content)
    one = header.tobuf() + content.ljust(tarfile.BLOCKSIZE, b"\0")
    return gzip.compress(one * count + tarfile.TarInfo("train.py").tobuf() + bytes(1024))


TRAIN = (tarfile.TarInfo("train.py"), b"print()")
BAD = {
    "none": (b"", "could not be unpacked"),
    "no archive": (b"PK\x03\x04 and so on", "could not be unpacked"),
    "cut off": (archive(TRAIN, (tarfile.TarInfo("data"), b"1" * 10_000))[:100], "could not be unpacked"),
    "climbs": (archive(TRAIN, (tarfile.TarInfo("../outside"), b"")), "could not be unpacked"),
    "link": (archive(TRAIN, link("train", "/etc")), "no plain file"),
    "larger than there are disks": (said_to_hold(10**12), "more than 200 MiB"),
    "sparse": (sparse(), "no plain file"),
    "a chain of long names": (prefixed(tarfile.GNUTYPE_LONGNAME, b"train.py", 3000), "headers do not end"),
    "a chain of records": (prefixed(tarfile.XHDTYPE, b"9 path=a\n", 3000), "headers do not end"),
    "a record without end": (prefixed(tarfile.XHDTYPE, b"9" * 19 + b" path=a\n"), "could not be unpacked"),
    "other script": (archive((tarfile.TarInfo("other.py"), b"")), "does not hold the script"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bundle_that_cannot_be_meant_is_refused_when_it_is_submitted(name: str) -> None:
    content, complaint = BAD[name]
    with pytest.raises(BadInputError, match=complaint):
        check(content, "train.py")


@pytest.mark.integration
def test_a_bundle_that_grows_without_end_fills_neither_service_nor_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_bundle, "MAX_UNPACKED_BYTES", 2**20)
    token, content = "t" * 32, bomb(8 * 2**20)
    check(bomb(2**19), "train.py")
    assert len(content) < 2**20
    with pytest.raises(BadInputError, match="more than 1 MiB"):
        check(content, "train.py")
    with (
        BundleServer({token: content}.get, "127.0.0.1") as server,
        pytest.raises(executor_bundle.BundleError, match="more than 1 MiB"),
    ):
        executor_bundle.fetch(server.url(token), tmp_path / "sandbox")


@pytest.mark.integration
@pytest.mark.parametrize("name", ["larger than there are disks", "sparse", "a chain of long names"])
def test_such_a_bundle_is_not_unpacked_on_an_agent_either(tmp_path: Path, name: str) -> None:
    content, complaint = BAD[name]
    token = "t" * 32
    with (
        BundleServer({token: content}.get, "127.0.0.1") as server,
        pytest.raises(executor_bundle.BundleError, match=complaint),
    ):
        executor_bundle.fetch(server.url(token), tmp_path / "sandbox")


# What the document says.


def test_what_the_document_calls_shown_is_shown() -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > 10
    there = {
        found
        for path in (ROOT / "tests").rglob("test_*.py")
        for found in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert named <= there
    assert all((ROOT / path).exists() for path in re.findall(r"`(tests/[\w/.]+)`", text))


# What the code may not use.

FORBIDDEN = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
OWN_OBJECTS = "dike/trial/pickled.py"
"""Loads what its user has pickled, in processes of that user's: a service refuses such searches."""
ROOMS = ("dike", "executor", "framework", "solver")


def sources() -> list[Path]:
    found = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    assert len(found) > 100
    return found


def unsafe(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in FORBIDDEN)
            case ast.ImportFrom(module=str(name)) if name.partition(".")[0] in FORBIDDEN:
                yield name
            case ast.Attribute(value=ast.Name("yaml"), attr=name) if name not in SAFE_YAML and name.islower():
                yield f"yaml.{name}"
            case ast.keyword(arg="allow_pickle", value=ast.Constant(True)):
                yield "allow_pickle=True"
            case ast.keyword(arg="shell", value=ast.Constant(True)):
                yield "shell=True"


SAFE_YAML = {"safe_load", "compose", "safe_dump"}


@pytest.mark.slow
def test_nothing_from_outside_is_run_or_unpickled() -> None:
    wrong = {str(path.relative_to(ROOT)): names for path in sources() if (names := list(unsafe(path)))}
    assert set(wrong.pop(OWN_OBJECTS)) == {"pickle", "cloudpickle"}
    assert wrong == {}


@pytest.mark.parametrize(
    "line", ["import pickle", "from dill import loads", "yaml.load(text)", "np.load(f, allow_pickle=True)"]
)
def test_that_would_be_noticed(line: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(line)
    assert list(unsafe(path))
