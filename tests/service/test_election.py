"""One service of several leads: elected by a real ZooKeeper, and by a lease in the database."""

from __future__ import annotations

import json
import logging
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from kazoo.client import KazooClient
from sqlalchemy import text

from dike.exceptions import BadInputError
from framework.embedded.cluster import EmbeddedCluster
from framework.service import election
from framework.service.election import EXIT_CODE, Ensemble, elected
from framework.service.store import ServiceStore
from tests.scheduler.test_lease import take_over
from tests.service.zookeeper_server import LONGEST_SESSION_S, ZooKeeper, zookeeper_server
from tests.waiting import wait_until

DEADLINE_S = 120.0
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def zookeeper() -> Iterator[ZooKeeper]:
    with zookeeper_server() as server:
        yield server


@pytest.fixture(autouse=True)
def long_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a slow machine from ending a session."""
    monkeypatch.setattr(election, "SESSION_TIMEOUT_S", LONGEST_SESSION_S)


@pytest.mark.parametrize(
    "uri",
    ["", "zk1:2181/dike", "zk://zk1/dike", "zk://zk1:2181", "zk://zk1:2181/", "zk://:b@zk1:1/d", "zk://z:1/a//b"],
)
def test_where_to_be_elected_has_to_be_said_in_full(uri: str) -> None:
    with pytest.raises(BadInputError, match="--ha takes zk://"):
        Ensemble.parse(uri)


def test_the_address_of_an_ensemble_is_read() -> None:
    assert Ensemble.parse("zk://zk1:2181,zk2:2182/dike/prod") == Ensemble("zk1:2181,zk2:2182", "/dike/prod")
    assert Ensemble.parse("zk://dike:s3cret@zk1:2181/dike") == Ensemble("zk1:2181", "/dike", "dike", "s3cret")


def test_the_password_is_in_no_message() -> None:
    with pytest.raises(BadInputError) as refused:
        Ensemble.parse("zk://dike:s3cret@zk1/dike")
    assert "s3cret" not in str(refused.value)


def test_the_next_leads_when_the_first_has_left(zookeeper: ZooKeeper) -> None:
    notes: list[str] = []
    lost: list[str] = []
    leads, may_leave = threading.Event(), threading.Event()
    uri = f"zk://{zookeeper.hosts}/one-after-the-other"

    def stand_by() -> None:
        with elected(uri, notes.append, lost.append, "second"):
            leads.set()
            may_leave.wait(DEADLINE_S)

    second = threading.Thread(target=stand_by)
    with elected(uri, notes.append, lost.append, "first"):
        second.start()
        wait_until(lambda: "standing by: first leads" in notes, "the second's standing by")
        assert not leads.is_set()
    assert leads.wait(DEADLINE_S)
    may_leave.set()
    second.join(DEADLINE_S)
    assert not lost


def test_who_cannot_reach_zookeeper_for_a_session_leads_no_more(
    zookeeper: ZooKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(election, "SESSION_TIMEOUT_S", 2.0)
    lost: list[str] = []
    with elected(f"zk://{zookeeper.hosts}/unheard", lambda text: None, lost.append):
        zookeeper.freeze()
        try:
            wait_until(lambda: lost, "the loss of the lead")
        finally:
            zookeeper.thaw()
    assert "has not answered for" in lost[0]


def test_strangers_cannot_stand_where_a_password_was_given(zookeeper: ZooKeeper) -> None:
    with (
        elected(f"zk://dike:s3cret@{zookeeper.hosts}/guarded", lambda text: None, lambda text: None),
        pytest.raises(BadInputError, match="cannot elect a leader: NoAuth"),
        elected(f"zk://{zookeeper.hosts}/guarded", lambda text: None, lambda text: None),
    ):
        raise AssertionError("two lead")


@pytest.mark.integration
def test_no_zookeeper_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(election, "CONNECT_TIMEOUT_S", 0.5)
    # As pymesos leaves it.
    logging.getLogger("kazoo.client").setLevel(logging.WARNING)
    with (
        pytest.raises(BadInputError, match=r"did not answer within 0\.5 s"),
        elected("zk://127.0.0.1:1/dike", lambda text: None, lambda text: None),
    ):
        raise AssertionError("elected without ZooKeeper")
    assert not caplog.records


# Services on a real Mesos.


@dataclass
class StandbyStage:
    """A service in a process of its own."""

    process: subprocess.Popen[bytes]
    log: Path

    def says(self, pattern: str) -> re.Match[str]:
        """Waits for a line."""
        said = self.log.read_text
        return wait_until(lambda: re.search(pattern, said()), pattern, said=said, lost=self._has_ended)

    def loses_its_session(self, zookeeper: ZooKeeper) -> None:
        """Has ZooKeeper give it up."""
        session, password = self.says(r"session (\d+) ([0-9a-f]+)").groups()
        zookeeper.end_session(int(session), bytes.fromhex(password))

    def ends(self) -> int:
        return self.process.wait(DEADLINE_S)

    def _has_ended(self) -> bool:
        return self.process.poll() is not None


@contextmanager
def services(folder: Path, cluster: EmbeddedCluster) -> Iterator[Callable[..., StandbyStage]]:
    started: list[StandbyStage] = []

    def start(name: str, ha: str, master: str = "") -> StandbyStage:
        log = folder / f"{name}.log"
        command = [sys.executable, "-m", "tests.service.serving_script", f"sqlite:///{folder}/s.db"]
        command += [master or cluster.master, *(["--ha", ha] if ha else [])]
        with log.open("wb") as output:
            process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
        started.append(StandbyStage(process, log))
        return started[-1]

    try:
        yield start
    finally:
        for service in started:
            service.process.kill()
            service.process.wait(DEADLINE_S)


def frameworks(cluster: EmbeddedCluster, kind: str) -> list[str]:
    answer = cluster.state()
    return [str(framework["id"]) for framework in answer[kind]]


@pytest.mark.mesos
def test_services_follow_each_other_in_one_framework(tmp_path: Path, zookeeper: ZooKeeper) -> None:
    uri = f"zk://{zookeeper.hosts}/services"
    subscribed = r"subscribed at \S+ as (\S+)"
    with EmbeddedCluster() as cluster, services(tmp_path, cluster) as start:
        first = start("first", uri)
        framework_id = first.says(subscribed)[1]
        second = start("second", uri)
        second.says(rf"standing by: \S+ process {first.process.pid} leads")
        stranger = start("stranger", "")
        assert stranger.ends() == BadInputError.exit_code
        stranger.says(rf"is being run by process {first.process.pid} on .* with --standby")

        first.process.kill()
        first.loses_its_session(zookeeper)
        assert second.says(subscribed)[1] == framework_id

        # A leader that is stopped loses the election, but not the lease: it may be about to write.
        third = start("third", uri)
        third.says("standing by")
        second.process.send_signal(signal.SIGSTOP)
        second.loses_its_session(zookeeper)
        third.says(rf"is being run by process {second.process.pid}")
        second.process.send_signal(signal.SIGCONT)
        assert third.says(subscribed)[1] == framework_id
        assert second.ends() == EXIT_CODE
        second.says("ZooKeeper has ended this service's session")

        # A service whose lease was taken ends immediately, and the framework stays for its successor.
        with closing(ServiceStore(f"sqlite:///{tmp_path}/s.db")) as store:
            take_over(store)
            assert third.ends() == EXIT_CODE
            third.says("was taken over by process .* on elsewhere")
            with store.database.engine.connect() as connection:
                assert connection.execute(text("SELECT owner FROM dike_services")).scalar_one() == "stranger"
        assert frameworks(cluster, "frameworks") == [framework_id]
        assert not frameworks(cluster, "completed_frameworks")


@pytest.mark.mesos
def test_a_master_is_found_through_zookeeper(tmp_path: Path, zookeeper: ZooKeeper) -> None:
    client = KazooClient(zookeeper.hosts, timeout=LONGEST_SESSION_S)
    client.start(DEADLINE_S)
    try:
        with EmbeddedCluster() as cluster, services(tmp_path, cluster) as start:
            host, _, port = cluster.master.partition(":")
            # As masters announce themselves; the one with the smallest number leads.
            info = json.dumps({"address": {"hostname": host, "ip": host, "port": int(port)}}).encode()
            client.create("/mesos/json.info_0000000007", info, ephemeral=True, makepath=True)
            client.create("/mesos/json.info_0000000008", b"another master", ephemeral=True)
            client.create("/mesos/log_replicas")
            service = start("service", "", f"zk://{zookeeper.hosts}/mesos")
            service.says(r"subscribed at \S+ as \S+")
            assert frameworks(cluster, "frameworks")
    finally:
        client.stop()
        client.close()
