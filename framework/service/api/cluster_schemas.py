"""Answers of the API about the service itself and its cluster; see `framework.service.api.schemas`."""

from __future__ import annotations

import datetime

from framework.scheduler.records import TaskRecord
from framework.service.api.schemas import View


class AgentView(View):
    """An agent (`framework.scheduler.agents.AgentFacts`); amounts of `cpus`, `mem` and `disk` in MiB, `gpus`, `ports`.

    Attributes:
        node: its host name, with a part of the id if several agents share the host name.
        active: whether it is registered with the master now.
        total: what the service's role may use of it when it is empty.
        used: what tasks of all frameworks use.
        offered: its last offer to the service, less what was launched on it since; None if it never offered anything.
        offered_s: time of that offer.
        held: what tasks of this service use.
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
        started_s: start of this service process.
        framework_id: its id at Mesos; None before the first subscription.
        connected: whether it is subscribed with the master.
        agents: by name; None until the master lists them.
        machine: machine and account of the tasks (`mesos_access.this_machine`) if that is a single machine without
            containers; empty otherwise.
        private: whether the service started this Mesos itself, so that it ends with the service, and all tasks with it.
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


class UsageView(View):
    """What the jobs of a user have used in a week (`framework.service.usage.Usage`)."""

    user: str
    week: datetime.date
    jobs: int
    gpu_hours: float
    cpu_hours: float
    waited_hours: float


class UsageList(View):
    """Usage, the newest week first."""

    usage: list[UsageView]


class Health(View):
    """The health of the service.

    Attributes:
        status: `ok`, or the problem in one sentence.
        connected: whether it is subscribed with the Mesos master; without it tasks keep running but none is launched.
        loop_age_s: seconds since the last iteration of the service's loop.
    """

    status: str
    connected: bool
    loop_age_s: float
