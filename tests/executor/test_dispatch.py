"""The executor: a process for each of its tasks, from a zygote of its own or from the machine's server."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dike.profile import Api
from dike.task import Role, TaskSpec
from executor import dispatch
from executor.dispatch import Dispatcher
from executor.messages import Addressed, LaunchOrder, LogChunk, Outcome, WantedOutput, decode_message, encode
from executor.process import children
from executor.slot_order import SlotOrder
from executor.trial_messages import Wanted, decode_slot_message
from executor.zygote_pool import warm
from framework.project import bundle
from tests.executor.slot_stage import HERE
from tests.waiting import is_alive, wait_until

TASK = TaskSpec("job", Role.WORKER, 0, {"ps": [], "worker": ["127.0.0.1:2"]}, Api.GRAPH, {})
NOWHERE = "http://127.0.0.1:9/bundle"
TOKEN = "t" * 32
SEARCH = SlotOrder("search", NOWHERE, "train.py", gpu_devices=()).encode()
DEADLINE_S = 120.0
UMASK = 0o022


class FakeDriver:
    """Stands where Mesos' driver would."""

    def __init__(self) -> None:
        self.updates: list[dict[str, Any]] = []
        self.messages: list[str] = []

    def sendStatusUpdate(self, status: dict[str, Any]) -> None:  # noqa: N802
        self.updates.append(status)

    def sendFrameworkMessage(self, data: str) -> None:  # noqa: N802
        self.messages.append(data)

    def wait_for_acknowledgements(self, timeout_s: float) -> bool:
        return timeout_s > 0

    def of(self, task_id: str) -> list[dict[str, Any]]:
        return [update for update in self.updates if update["task_id"]["value"] == task_id]

    def states(self, task_id: str) -> list[str]:
        return [update["state"] for update in self.of(task_id)]

    def running(self) -> list[str]:
        return [each["task_id"]["value"] for each in self.updates if each["state"] == "TASK_RUNNING"]

    def output(self, task_id: str) -> str:
        said = [decode_message(data) for data in self.messages]
        return b"".join(one.data for one in said if isinstance(one, LogChunk) and one.task_id == task_id).decode()


class ExecutorStage:
    """Our executor in a thread of this process; its tasks' processes are children of this process."""

    def __init__(self, sandbox: Path, served: str = "") -> None:
        self.driver = FakeDriver()
        self.sandbox = sandbox
        self.dispatcher = Dispatcher(sandbox, "executor", served)
        self.thread = threading.Thread(target=self.dispatcher.main, args=(self.driver,), daemon=True)

    def launch(self, **orders: str) -> None:
        for task_id, order in orders.items():
            self.dispatcher.launchTask(self.driver, {"task_id": {"value": task_id}, "data": order})
        if not self.thread.is_alive():
            self.thread.start()

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        wait_until(condition, what, said=lambda: f"{self.driver.updates} {self.logs}")

    def holder(self, task_id: str) -> int:
        """The id of the process that holds a task; 0 if none does."""
        processes = list(self.dispatcher._processes)
        return next((process.pid or 0 for process in processes if task_id in process.tasks), 0)

    @property
    def logs(self) -> str:
        files = [path for path in self.sandbox.rglob("*") if path.suffix in (".out", ".log") or path.name == "stderr"]
        return "\n".join(f"{path}: {path.read_text()[-1000:]}" for path in files)

    def join(self) -> None:
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive(), self.logs


@pytest.fixture(scope="module")
def bundle_url() -> Iterator[str]:
    with bundle.BundleServer({TOKEN: bundle.pack(HERE / "job_script.py")}.get, "127.0.0.1") as server:
        yield server.url(TOKEN)


@pytest.fixture(scope="module")
def parent() -> Iterator[None]:
    """This process adopts orphans, as executors do."""
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1, 0, 0, 0)
    yield
    libc.prctl(36, 0, 0, 0, 0)


@pytest.fixture(autouse=True)
def strangers(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """This process has children that are not the executor's."""
    if "server" in request.fixturenames:
        request.getfixturevalue("server")
    others = set(children(os.getpid()))
    monkeypatch.setattr(dispatch, "children", lambda pid: set(children(pid)) - others)


def order(bundle_url: str, ways: str, index: int = 0) -> str:
    task = TaskSpec(**{**vars(TASK), "index": index})
    return LaunchOrder(
        task, bundle_url, "job_script.py", (ways,), stream_logs=True, preload=(), gpu_devices=(), kill_grace_s=60
    ).encode()


@pytest.mark.parametrize("bad", [encode({"kind": "slot"}), encode([]), encode({"x": 1}), "?"])
def test_an_order_of_another_version_fails_the_task_and_ends_the_executor(tmp_path: Path, bad: str) -> None:
    executor = ExecutorStage(tmp_path)
    executor.launch(task=bad)
    executor.join()
    (update,) = executor.driver.updates
    assert update["state"] == "TASK_FAILED"
    assert "another version of Dike" in update["message"]


def test_a_shutdown_before_the_first_task_ends_the_executor(tmp_path: Path) -> None:
    executor = ExecutorStage(tmp_path)
    executor.dispatcher.shutdown(executor.driver)
    executor.launch()
    executor.join()
    assert executor.driver.updates == []


def test_a_message_says_for_which_task_it_is() -> None:
    message = Addressed("task", WantedOutput({"stdout": 3}).encode())
    assert Addressed.decode(message.encode()) == message
    for other in (WantedOutput({}).encode(), encode([]), encode({"task": "x"})):
        with pytest.raises(ValueError, match="addressed"):
            Addressed.decode(other)
    with pytest.raises(ValueError, match="kind"):
        decode_slot_message(encode({"kind": "other"}))


@pytest.mark.integration
@pytest.mark.usefixtures("parent")
def test_each_task_has_its_own_process_folder_and_end(tmp_path: Path, bundle_url: str) -> None:
    # Those that other tests' processes are forked from.
    before = set(psutil.Process().children())
    executor = ExecutorStage(tmp_path)
    driver = executor.driver
    orders = {"trains": order(bundle_url, "train"), "fails": order(bundle_url, "fail", 1), "search": SEARCH}
    executor.launch(**orders)
    executor.wait_for(lambda: "TASK_FAILED" in driver.states("fails"), "the end of a task")
    executor.wait_for(lambda: "begins" in driver.output("trains"), "the output of the other")
    assert driver.states("fails") == ["TASK_STARTING", "TASK_RUNNING", "TASK_FAILED"]
    assert Outcome.decode(driver.of("fails")[-1]["data"]).exit_code == 3
    assert (tmp_path / "trains" / "stdout").read_text() == "attempt 0 begins\n"
    assert "about to fail" in (tmp_path / "fails" / "stderr").read_text()
    # One that cannot fetch its script fails alone, too.
    executor.wait_for(lambda: "TASK_FAILED" in driver.states("search"), "the end of the search's task")
    assert "could not be fetched" in driver.of("search")[-1]["message"]
    # A message for one task reaches no other task; malformed messages are ignored.
    told = len(driver.messages)
    executor.dispatcher.frameworkMessage(driver, Addressed("fails", WantedOutput({"stdout": 0}).encode()).encode())
    executor.dispatcher.frameworkMessage(driver, Addressed("trains", encode({"kind": "other"})).encode())
    executor.dispatcher.frameworkMessage(driver, Addressed("trains", WantedOutput({"stdout": 0}).encode()).encode())
    executor.wait_for(lambda: driver.output("trains").count("begins") == 2, "output that is sent again")
    assert len(driver.messages) == told + 1
    # A task that comes later is taken in.
    executor.launch(later=order(bundle_url, "finish", 2))
    executor.wait_for(lambda: "TASK_FINISHED" in driver.states("later"), "the end of a later task")
    executor.dispatcher.killTask(driver, {"value": "trains"})
    executor.join()
    assert driver.states("trains") == ["TASK_STARTING", "TASK_RUNNING", "TASK_KILLED"]
    assert set(psutil.Process().children()) <= before


@pytest.mark.integration
@pytest.mark.usefixtures("parent")
def test_a_task_whose_holder_is_killed_fails_and_leaves_nothing(tmp_path: Path, bundle_url: str) -> None:
    executor = ExecutorStage(tmp_path)
    driver = executor.driver
    executor.launch(task=order(bundle_url, "litter"), other=order(bundle_url, "train", 1))
    executor.wait_for(lambda: "begins" in driver.output("task") and "begins" in driver.output("other"), "both tasks")
    left = wait_until(
        lambda: next((it["pid"] for it in map(_report, driver.messages) if it.get("type") == "left"), None), "litter"
    )
    held = executor.holder("task")
    group = [process.pid for process in psutil.Process(held).children(recursive=True)]
    assert group
    os.kill(held, signal.SIGKILL)
    executor.wait_for(lambda: "TASK_FAILED" in driver.states("task"), "the end of the task")
    assert driver.of("task")[-1]["message"] == "the process that held the task was killed"
    wait_until(lambda: not any(map(is_alive, (*group, left))), "the end of its processes")
    assert driver.states("other") == ["TASK_STARTING", "TASK_RUNNING"]
    executor.dispatcher.shutdown(driver)
    executor.join()
    assert driver.states("other")[-1] == "TASK_KILLED"


@pytest.mark.integration
@pytest.mark.usefixtures("parent")
def test_slots_of_a_search_share_a_process(tmp_path: Path, bundle_url: str) -> None:
    search = SlotOrder("search", bundle_url, "job_script.py", gpu_devices=())
    executor = ExecutorStage(tmp_path)
    driver = executor.driver
    other = dataclasses.replace(search, cpus=2.0).encode()
    gpu = dataclasses.replace(search, gpu_devices=(0,)).encode()
    executor.launch(first=search.encode(), second=search.encode(), other=other, gpu_0=gpu, gpu_1=gpu)
    executor.wait_for(lambda: len(driver.running()) == 5, "all slots")
    executor.launch(third=search.encode())
    executor.wait_for(lambda: "third" in driver.running(), "a slot that comes later")
    assert len({executor.holder(task) for task in ("first", "second", "third")}) == 1
    assert len({executor.holder(task) for task in ("first", "gpu_0", "gpu_1", "other")}) == 4
    assert (tmp_path / "second").is_dir()
    # Each ends for itself.
    executor.dispatcher.killTask(driver, {"value": "first"})
    executor.wait_for(lambda: "TASK_KILLED" in driver.states("first"), "the end of the first")
    leave = Addressed("second", Wanted(1, leave=True).encode()).encode()
    executor.dispatcher.frameworkMessage(driver, leave)
    executor.wait_for(lambda: "TASK_FINISHED" in driver.states("second"), "the end of the second")
    # A slot that is assigned to an unresponsive process is moved to another one.
    held = executor.holder("third")
    os.kill(held, signal.SIGSTOP)
    executor.launch(late=search.encode())
    executor.wait_for(lambda: executor.holder("late") == held, "a slot without updates")
    os.kill(held, signal.SIGKILL)
    executor.wait_for(lambda: "late" in driver.running(), "that slot")
    assert driver.states("third") == ["TASK_STARTING", "TASK_RUNNING", "TASK_FAILED"]
    executor.dispatcher.shutdown(driver)
    executor.join()
    assert driver.states("late") == ["TASK_STARTING", "TASK_RUNNING", "TASK_KILLED"]


def _report(message: str) -> dict[str, Any]:
    return getattr(decode_message(message), "content", {})


@pytest.mark.integration
@pytest.mark.usefixtures("parent")
def test_what_is_in_the_group_of_a_process_ends_with_its_holder(
    tmp_path: Path, bundle_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As where orphans become another process' children.
    monkeypatch.setattr(Dispatcher, "_kill_orphans", lambda self: None)
    executor = ExecutorStage(tmp_path)
    driver = executor.driver
    executor.launch(task=order(bundle_url, "helped"))
    helper = wait_until(
        lambda: next((it["pid"] for it in map(_report, driver.messages) if it.get("type") == "left"), None), "a helper"
    )
    os.kill(executor.holder("task"), signal.SIGKILL)
    wait_until(lambda: not is_alive(helper), "the helper's end")
    executor.join()


@pytest.mark.integration
@pytest.mark.usefixtures("parent")
def test_a_task_that_is_killed_while_others_are_imported_is_never_started(
    tmp_path: Path, bundle_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "ZygotePool", FakeZygotes)
    executor = ExecutorStage(tmp_path)
    executor.launch(task=order(bundle_url, "train"))
    executor.wait_for(lambda: executor.driver.states("task") == ["TASK_STARTING"], "its start")
    executor.dispatcher.killTask(executor.driver, {"value": "task"})
    executor.join()
    assert executor.driver.states("task") == ["TASK_STARTING", "TASK_KILLED"]


class FakeZygotes:
    """Zygotes that import for ever."""

    watched_fds = pids = ()

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def request_fork(self, *_: object) -> None:
        pass

    def poll(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A zygote server, deep down: its socket's path is longer than the system takes."""
    folder = tmp_path.joinpath(*["folder"] * 15)
    folder.mkdir(parents=True)
    path = folder / "zygotes.sock"
    with (folder / "log").open("wb") as log:
        command = [sys.executable, "-P", "-m", "executor.zygote_server", str(path), str(folder)]
        process = subprocess.Popen(command, stdout=log, stderr=log, umask=UMASK)
    yield str(path), process
    process.kill()
    process.wait()


@pytest.mark.integration
@pytest.mark.usefixtures("parent")
def test_executors_share_what_a_server_has_imported(
    tmp_path: Path, bundle_url: str, server: tuple[str, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, process = server
    values = LaunchOrder.decode(order(bundle_url, "finish"))
    # Whatever a process has from Mesos or of its own is no reason for another zygote.
    monkeypatch.setenv("MESOS_TASK", "mine")
    warm(path, values.setup.kind(os.environ))
    for number in range(2):
        monkeypatch.setenv("MESOS_TASK", f"other {number}")
        sandbox = tmp_path / f"sandbox-{number}"
        sandbox.mkdir()
        executor = ExecutorStage(sandbox, path)
        executor.launch(task=values.encode())
        executor.join()
        assert executor.driver.states("task") == ["TASK_STARTING", "TASK_RUNNING", "TASK_FINISHED"], executor.logs
        assert not list(sandbox.glob("zygote-*.out"))
        # Output files follow the user's umask; the socket is private.
        assert stat.S_IMODE((sandbox / "task" / "zygote.out").stat().st_mode) == 0o666 & ~UMASK
    assert len(list(Path(path).parent.glob("zygote-*.out"))) == 1
    assert Path(path).stat().st_mode & 0o077 == 0
    # One that is gone is done without.
    process.kill()
    process.wait()
    sandbox = tmp_path / "alone"
    sandbox.mkdir()
    executor = ExecutorStage(sandbox, path)
    executor.launch(task=values.encode())
    executor.join()
    assert executor.driver.states("task")[-1] == "TASK_FINISHED", executor.logs
    assert list(sandbox.glob("zygote-*.out"))


@pytest.mark.integration
def test_a_server_refuses_nonsense(server: tuple[str, subprocess.Popen[bytes]]) -> None:
    path, process = server
    wait_until(lambda: os.path.exists(path), "the server")
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    for nonsense in (b"[]", b"not JSON", json.dumps({"kind": "[]"}).encode()):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(f"/proc/self/fd/{folder}/zygotes.sock")
            connection.send(nonsense)
            assert b"not a request" in connection.recv(1000)
    os.close(folder)
    assert process.poll() is None
