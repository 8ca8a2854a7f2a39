"""What is known of the script's sessions and of what it runs in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dike.roles.graph import training
from dike.trial.graph.runs import key_of
from dike.trial.graph.state import SessionState


@dataclass
class Plan:
    """What is known of a run that a script does again and again.

    Attributes:
        key: short name of what is run.
        trains: whether it is a training step.
        more: the loss, where it is not fetched but can be.
        loss: where among all values the loss is; None where it is not.
        advance: by how much it moves the global step; None before its first time.
    """

    key: str
    trains: bool
    more: list[Any]
    loss: int | None
    advance: int | None = None


@dataclass
class TrackedSession:
    """What is known of a session.

    Attributes:
        number: how many sessions the script had made before.
        state: saves and restores it.
        plans: names of what is run -> what is known of it.
        is_monitored: whether a monitored session owns it.
        has_run: whether it may hold anything.
        counts: whether a training step of it has been seen to move the global step.
    """

    number: int
    state: SessionState
    plans: dict[tuple[str, ...], Plan] = field(default_factory=dict)
    is_monitored: bool = False
    has_run: bool = False
    counts: bool = False

    def plan(self, graph: Any, targets: list[Any], fetches: list[Any]) -> Plan:
        """What is known of a run.

        Args:
            graph: the session's graph.
            targets: ops to run.
            fetches: tensors to return.
        """
        names = (*[op.name for op in targets], *[tensor.name for tensor in fetches])
        plan = self.plans.get(names)
        if plan is None:
            known = training.of(graph)
            ops = [*targets, *(tensor.op for tensor in fetches)]
            trains = known.trains(ops)
            loss = known.loss_beside(ops) if trains else None
            more = [] if loss is None or loss.name in names else [loss]
            position = None if loss is None else [tensor.name for tensor in (*fetches, *more)].index(loss.name)
            plan = self.plans[names] = Plan(key_of([str(self.number), *names]), trains, more, position)
        return plan
