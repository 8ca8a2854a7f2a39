"""What the API answers with about the service itself and its cluster; see `framework.service.api.schemas`."""

from __future__ import annotations

from framework.scheduler.records import TaskRecord
from framework.service.api.schemas import View


class AgentView(View):
    """An agent (`framework.scheduler.agents.AgentFacts`); amounts of `cpus`, `mem` and `disk` in MiB, `gpus`, `ports`.

    Attributes:
        id: Mesos' id.
        node: its host name, with a part of the id where several agents share that.
        active: whether it is registered with the master; others have been.
        attributes: as text.
        total: what the service's role may use of it when nothing runs there.
        used: what tasks of all frameworks hold.
        offered: what it offered to the service last, less what was launched on that since; None if it never did.
        offered_s: when that was.
        held: what tasks of this service hold.
        tasks: those tasks.
    """

    id: str
    node: str
    active: bool
    attributes: dict[str, str]
    total: dict[str, float]
    used: dict[str, float]
    offered: dict[str, float] | None
    offered_s: float | None
    held: dict[str, float]
    tasks: list[TaskRecord]


class ClusterView(View):
    """The service and its cluster.

    Attributes:
        version: of Dike.
        started_s: when this service process started.
        framework_id: under which Mesos knows it; None before the first subscription.
        connected: whether the subscription stands.
        master, mesos_version: the master that was found at the start.
        agents: by name; None as long as the master has not told.
        machine: where tasks run, and as whom (`session.this_machine`), if that is all one machine, without
            containers; empty otherwise.
        private: whether this Mesos belongs to the service, and ends with it, and all tasks with that.
    """

    version: str
    started_s: float
    framework_id: str | None
    connected: bool
    master: str
    mesos_version: str
    agents: list[AgentView] | None
    machine: str = ""
    private: bool = False


class Health(View):
    """How the service is.

    Attributes:
        status: `ok`, or what is wrong in one sentence.
        connected: whether the subscription with the Mesos master stands; without it jobs run on, and none begins.
        loop_age_s: seconds since the service's loop last went round.
    """

    status: str
    connected: bool
    loop_age_s: float
