"""This machine's part of a cluster: starts and ends its daemons, and describes the cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from dike.exceptions import BadInputError, DikeError
from framework.cluster import join
from framework.cluster.authority import Authority
from framework.cluster.records import (
    AGENT,
    HEAD_INDEX,
    HEAD_ROLE,
    NAME,
    ClusterFolder,
    Description,
    Membership,
    folder_of,
    folders,
    random_network,
)
from framework.cluster.slurm import allocation
from framework.embedded.access import ClusterAccess
from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster, MachinePart
from framework.embedded.detached import DetachedFiles
from framework.embedded.library import check_platform, ensure_library
from framework.embedded.loopback import get_json
from framework.embedded.machine import gpu_models, local_resources
from framework.embedded.ports import reserve_blocks
from framework.mesos.offers import HOST_ATTRIBUTE
from framework.user_folders import file_lock
from solver.units import format_bytes

DEFAULT_LISTEN = "0.0.0.0:8690"
DEFAULT_NAME = "cluster"
ANY_ADDRESS = "0.0.0.0"  # noqa: S104 (compared with, not opened)
PUBLIC_ADDRESS = ("192.0.2.1", 9)
"""An address for documentation (RFC 5737), towards which the system selects this machine's address; nothing is sent."""
NETWORK_ATTRIBUTE = "network_gbps"
DRAIN_TIMEOUT_S = 120.0
POLL_INTERVAL_S = 0.2


@dataclass(frozen=True)
class MachineOptions:
    """What a machine contributes.

    Attributes:
        name: its name in the cluster; empty for its host name, or in Slurm its node and job.
        resources, attributes: of its agent, in Mesos' text form; empty for all that is found, or in Slurm for what is
            allocated.
        has_agent: whether it runs tasks.
    """

    name: str = ""
    resources: str = ""
    attributes: str = ""
    has_agent: bool = True

    @property
    def spec(self) -> AgentSpec:
        """Raises BadInputError if a text is malformed."""
        slurm = allocation()
        if slurm is None:
            return AgentSpec(self.resources or local_resources(), self.attributes).validated().with_cpus_and_memory()
        attributes = ";".join(filter(None, (self.attributes, slurm.attributes)))
        return AgentSpec(self.resources or slurm.resources(), attributes).validated()

    def checked_name(self) -> str:
        """Raises BadInputError if it is not a name of a machine."""
        slurm = allocation()
        name = self.name or (socket.gethostname().partition(".")[0] if slurm is None else slurm.name)
        if not NAME.fullmatch(name):
            raise BadInputError(f"'{name}' is not a name of a machine: use letters, digits, '.' and '-' (--name).")
        return name


class ClusterMachine:
    """This machine's part of a cluster, running or not."""

    def __init__(self, folder: ClusterFolder, membership: Membership) -> None:
        self.folder = folder
        self.membership = membership

    @property
    def cluster(self) -> Description:
        return self.membership.cluster

    @property
    def is_head(self) -> bool:
        return self.membership.role == HEAD_ROLE

    @property
    def access(self) -> ClusterAccess:
        return self.cluster.access

    @property
    def zygotes(self) -> str:
        """Socket of this machine's zygote server."""
        return str(self.folder.mesos / "zygotes.sock")

    @property
    def _files(self) -> DetachedFiles:
        return DetachedFiles(self.folder.mesos, self.folder.process_file, self.folder.path / "process.lock")

    def is_up(self) -> bool:
        return self._files.find() is not None

    def describe_resources(self) -> str:
        """Such as `32 CPUs, 128 GiB, 4 x A100`."""
        own = self.membership
        spec = AgentSpec(own.resources)
        parts = [f"{spec.scalar('cpus'):g} CPUs", format_bytes(int(spec.scalar("mem")) << 20)]
        if gpus := int(spec.scalar("gpus")):
            models = sorted(set(gpu_models()))
            parts.append(f"{gpus} x {', '.join(models) or 'GPU'}")
        return ", ".join(parts)

    def start(self) -> None:
        """Starts this machine's daemons in the background.

        Raises:
            BadInputError: they run already.
            DikeError: they do not start.
        """
        files = self._files
        with file_lock(files.lock):
            if files.find() is not None:
                raise _already_in(self.membership)
            self._check_ports()
            files.bring_up(self._planned())

    @contextlib.contextmanager
    def running(self) -> Iterator[EmbeddedCluster]:
        """Runs the daemons within the context, in the foreground. Raises as `start`."""
        files = self._files
        with file_lock(files.lock):
            if files.find() is not None:
                raise _already_in(self.membership)
            self._check_ports()
            shutil.rmtree(files.work_dir, ignore_errors=True)
            planned = self._planned()
            planned.start()
            files.record(planned)
        try:
            yield planned
        finally:
            planned.stop()
            files.state.unlink(missing_ok=True)

    def stop(self) -> bool:
        """Ends this machine's daemons and all tasks on them; returns whether they ran."""
        return self._files.take_down()

    def forget(self) -> None:
        """Removes this machine's files about the cluster; on the head with its store."""
        shutil.rmtree(self.folder.path, ignore_errors=True)

    def _planned(self) -> EmbeddedCluster:
        own, cluster = self.membership, self.cluster
        services = {"gateway": self._program("gateway")}
        if self.is_head:
            services["store"] = self._program("store")
        part = MachinePart(
            access=self.access,
            master_port=cluster.port,
            has_master=self.is_head,
            address=cluster.address(own.index),
            port=cluster.port + AGENT,
            hostname=own.name,
            services=services,
            store=cluster.store,
        )
        specs = [AgentSpec(own.resources, own.attributes)] if own.resources else []
        return EmbeddedCluster(specs, work_dir=self.folder.mesos, part=part)

    def _program(self, name: str) -> list[str]:
        return [sys.executable, "-P", "-m", f"framework.cluster.{name}", str(self.folder.path)]

    def _check_ports(self) -> None:
        if not self.is_head:
            return
        host, port = join.parse_address(self.membership.listen)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise BadInputError(
                    f"The cluster cannot listen at {host}:{port}: {error.strerror}; name another address with --listen."
                ) from error

    def state(self) -> dict[str, Any] | None:
        """The master's state; None if it does not answer."""
        return get_json(self.access.address, self.cluster.port, "/master/state", self.access.credentials)

    def describe(self) -> dict[str, Any]:
        """The cluster and its machines, for `dike cluster status`.

        Raises:
            DikeError: the master does not answer.
        """
        # First, because it says whether this machine is still a member.
        silent_s = join.ask_head(self.folder, self.cluster, {"kind": "members"})["members"]
        state = self.state()
        if state is None:
            raise DikeError(
                f"The master of the cluster '{self.cluster.name}' at {self.cluster.head} does not answer; it may be "
                "starting."
            )
        tasks: dict[str, list[str]] = {}
        for framework in state.get("frameworks", []):
            for task in framework.get("tasks", []):
                tasks.setdefault(task["slave_id"], []).append(f"{framework['name']}: {task['name']}")
        agents = {str(agent["hostname"]): agent for agent in state["slaves"]}
        machines = []
        for name in sorted({*agents, *silent_s}):
            agent = agents.get(name, {})
            attributes = dict(agent.get("attributes", {}))
            machines.append(
                {
                    "name": name,
                    "active": bool(agent.get("active")),
                    "host": attributes.pop(HOST_ATTRIBUTE, ""),
                    "resources": agent.get("resources", {}),
                    "used": agent.get("used_resources", {}),
                    "attributes": attributes,
                    "tasks": tasks.get(agent.get("id", ""), []),
                    "silent_s": silent_s.get(name),
                }
            )
        return {
            "name": self.cluster.name,
            "head": self.cluster.head,
            "master": self.cluster.master,
            "this_machine": self.membership.name,
            "machines": machines,
        }


def own_machines() -> list[ClusterMachine]:
    """The clusters that this machine belongs to, running or not."""
    found = []
    for folder in folders():
        membership = folder.membership()
        if membership is not None:
            found.append(ClusterMachine(folder, membership))
    return found


def running_machine() -> ClusterMachine | None:
    """This machine's part of a running cluster; None if it is in none."""
    return next((machine for machine in own_machines() if machine.is_up()), None)


def machine_at(address: str) -> ClusterMachine | None:
    """This machine's part of the cluster whose master has a virtual address; None if it is in no such cluster."""
    return next((machine for machine in own_machines() if machine.access.address == address), None)


def create_head(options: MachineOptions, cluster_name: str, listen: str) -> ClusterMachine:
    """Makes a new cluster with this machine as its head, or finds the one of that name; starts nothing.

    Raises:
        BadInputError: an option cannot be used.
    """
    check_platform()
    if not NAME.fullmatch(cluster_name):
        raise BadInputError(f"'{cluster_name}' is not a name of a cluster: use letters, digits, '.' and '-' (--name).")
    host, port = join.parse_address(listen)
    spec = options.spec
    folder = folder_of(f"head-{cluster_name}")
    known = folder.membership()
    # Jobs of a batch system may share a machine, each with a cluster of its own.
    others = [] if allocation() is not None else own_machines()
    for machine in (*others, *([] if known is None else [ClusterMachine(folder, known)])):
        if machine.is_up():
            raise _already_in(machine.membership)
    folder.make()
    if known is None or not folder.keys.authority_key.exists():
        Authority.create(folder.keys, cluster_name)
        network, first = random_network(), _free_port()
        secret = ClusterAccess().secret
    else:
        network, first, secret = known.cluster.network, known.cluster.port, known.cluster.secret
    reached = own_address() if host == ANY_ADDRESS else host
    own = Membership(
        role=HEAD_ROLE,
        name=options.checked_name(),
        index=HEAD_INDEX,
        host=reached,
        cluster=Description(cluster_name, network, first, f"{reached}:{port}", secret),
        resources=spec.resources if options.has_agent else "",
        attributes=_with_host(spec.attributes, reached),
        listen=f"{host}:{port}",
    )
    folder.write_membership(own)
    return ClusterMachine(folder, own)


def join_cluster(options: MachineOptions, head: str, token: str) -> tuple[ClusterMachine, tuple[str, ...]]:
    """Joins a cluster; starts nothing. Returns this machine's part, and warnings.

    Raises:
        BadInputError: an option cannot be used, or the head does not admit this machine.
    """
    check_platform()
    spec = options.spec
    name = options.checked_name()
    folder = folder_of(f"member-{name}")
    known = folder.membership()
    if known is not None and ClusterMachine(folder, known).is_up():
        raise _already_in(known)
    here = running_machine()
    if here is not None and here.membership.resources and not options.resources and allocation() is None:
        # Its resources would count twice.
        raise _already_in(here.membership)
    shutil.rmtree(folder.path, ignore_errors=True)
    ensure_library()
    answer = join.ask_to_join(folder, head, token, name)
    own = dataclasses.replace(
        answer.membership, resources=spec.resources, attributes=_with_host(spec.attributes, answer.membership.host)
    )
    folder.write_membership(own)
    return ClusterMachine(folder, own), answer.warnings


def _already_in(known: Membership) -> BadInputError:
    if known.role == HEAD_ROLE:
        return BadInputError(
            f"This machine is the head of the cluster '{known.cluster.name}', which is up already: "
            "`dike cluster token` prints how others join, `dike cluster stop` ends it."
        )
    return BadInputError(
        f"This machine is in the cluster '{known.cluster.name}' as {known.name} already: `dike cluster leave` first."
    )


def known_member(options: MachineOptions) -> ClusterMachine:
    """This machine's part of the cluster that it has joined before.

    Raises:
        BadInputError: there is none, or an option cannot be used.
    """
    name = options.checked_name()
    folder = folder_of(f"member-{name}")
    known = folder.membership()
    if known is None:
        raise BadInputError(
            f"This machine has joined no cluster as {name}; name the head's address and a token "
            "(`dike cluster token` on the head prints both)."
        )
    if options.resources or options.attributes:
        spec = options.spec
        attributes = _with_host(spec.attributes, known.host)
        known = dataclasses.replace(known, resources=spec.resources, attributes=attributes)
        folder.write_membership(known)
    return ClusterMachine(folder, known)


def leave_cluster(machine: ClusterMachine, notify: Callable[[str], None], *, forget: bool = True) -> None:
    """Drains this machine's agent and ends it; with `forget` this machine is no member any more."""
    try:
        drain(machine, notify)
    except DikeError as error:
        notify(f"the tasks on this machine are not saved: {error}")
    if not forget:
        return
    try:
        join.ask_head(machine.folder, machine.cluster, {"kind": "leave"})
    except join.NotAMemberError:
        notify("the head had removed this machine already")
    except DikeError as error:
        notify(f"the head still lists this machine (`dike cluster remove {machine.membership.name}` there): {error}")
    machine.stop()
    machine.forget()


def remove_member(machine: ClusterMachine, name: str) -> None:
    """Removes a member, on the head: its certificate is not accepted any more, and its tasks restart elsewhere.

    Raises:
        BadInputError: there is no such member.
    """
    if name == machine.membership.name:
        raise BadInputError(f"{name} is the head itself; `dike cluster stop` ends the cluster.")
    with machine.folder.changing_members() as members:
        if members.pop(name, None) is None:
            raise BadInputError(f"No member is called {name}; `dike cluster status` lists them.")
    agent = _agent_of(machine, name)
    if agent is not None:
        _operate(machine, {"type": "MARK_AGENT_GONE", "mark_agent_gone": {"agent_id": {"value": agent["id"]}}})


def own_frameworks(machine: ClusterMachine) -> list[str]:
    """Command lines of this account's processes on this machine that use the cluster: `dike run` and the like."""
    found = []
    master = (machine.access.address, machine.cluster.port)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            is_own = process.pid == os.getpid() or "framework.cluster.gateway" in words
            is_daemon = any(word.endswith("daemon.py") for word in words)
            if not is_own and not is_daemon and any(one.raddr == master for one in process.net_connections("tcp4")):
                found.append(" ".join(words))
    return found


def drain(machine: ClusterMachine, notify: Callable[[str], None], timeout_s: float = DRAIN_TIMEOUT_S) -> bool:
    """Has Mesos end the tasks of this machine's agent, which save what they have; returns whether all have ended."""
    agent = _agent_of(machine, machine.membership.name)
    if agent is None:
        return True
    call = {
        "type": "DRAIN_AGENT",
        "drain_agent": {
            "agent_id": {"value": agent["id"]},
            "max_grace_period": {"nanoseconds": int(timeout_s * 1e9)},
        },
    }
    _operate(machine, call)
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        state = machine.state() or {}
        left = [
            task["name"]
            for framework in state.get("frameworks", [])
            for task in framework.get("tasks", [])
            if task["slave_id"] == agent["id"]
        ]
        if state and not left:
            _operate(machine, {"type": "MARK_AGENT_GONE", "mark_agent_gone": {"agent_id": {"value": agent["id"]}}})
            return True
        time.sleep(POLL_INTERVAL_S)
    notify("some tasks did not end in time; they are killed")
    return False


def _agent_of(machine: ClusterMachine, name: str) -> dict[str, Any] | None:
    agents: list[dict[str, Any]] = (machine.state() or {}).get("slaves", [])
    return next((one for one in agents if one["hostname"] == name and one["active"]), None)


def _operate(machine: ClusterMachine, call: Mapping[str, Any]) -> None:
    """Makes a call of Mesos' operator API; raises DikeError."""
    from framework.mesos.master import post_operation

    post_operation(machine.cluster.master, machine.access.credentials, call)


def own_address() -> str:
    """This machine's address on the way to other networks, or in its own; loopback if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(PUBLIC_ADDRESS)
            return str(probe.getsockname()[0])
        except OSError:  # It has no route to other networks.
            cards = (address for addresses in psutil.net_if_addrs().values() for address in addresses)
            ipv4 = [card.address for card in cards if card.family == socket.AF_INET]
            return next((address for address in ipv4 if not address.startswith("127.")), "127.0.0.1")


def _with_host(attributes: str, host: str) -> str:
    """Adds what other machines need to know, unless it is given: the address, and the speed of its network card."""
    named = {part.partition(":")[0] for part in attributes.split(";")}
    gbps = _network_gbps(host)
    speed = f"{NETWORK_ATTRIBUTE}:{gbps:g}" if gbps and NETWORK_ATTRIBUTE not in named else ""
    return ";".join(filter(None, (attributes, speed, f"{HOST_ATTRIBUTE}:{host}")))


def _network_gbps(host: str) -> float:
    """Speed of the network card with an address, in Gbit/s; 0 if it is not known."""
    speeds_mbps = psutil.net_if_stats()
    for card, addresses in psutil.net_if_addrs().items():
        if card in speeds_mbps and any(address.address == host for address in addresses):
            return speeds_mbps[card].speed / 1000
    return 0.0


def _free_port() -> int:
    """The first of the cluster's ports; free on this machine."""
    [block] = reserve_blocks(1)
    block.claim.close()
    return block.first
