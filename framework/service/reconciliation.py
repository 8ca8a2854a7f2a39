"""When the master is asked for tasks' states: after each subscription until all have answered, then for the rest.

Explicit reconciliation names tasks and is the jobs' own to begin, since they know when silence would mean something
(`framework.connection`); this goes on where no answer came, and now and then asks for all again, since only so the
master tells which it does not know. Implicit reconciliation makes it name all tasks of ours, and so those that nobody
knows.
"""

from __future__ import annotations

from collections.abc import Iterable

from framework.connection import RECONCILE_AFTER_S

ASK_AGAIN_S = RECONCILE_AFTER_S + 5.0
"""After the jobs have asked, even those that wait for a master that has just started."""
LONGEST_PAUSE_S = 120.0
DEADLINE_S = 60.0
"""After so long the rest is asked for, answers or not."""
EVERY_S = 900.0
"""How often all tasks are asked for when nothing happens."""


class Reconciliation:
    """Which questions to the master are due."""

    def __init__(self) -> None:
        self._unanswered: set[str] = set()
        self._ask_s: float | None = None
        self._pause_s = ASK_AGAIN_S
        self._implicit_s: float | None = None
        self._all_s: float | None = None
        self._since_s = 0.0

    @property
    def unanswered(self) -> frozenset[str]:
        """Tasks of which nothing was heard since the subscription, or since it became doubtful that they run."""
        return frozenset(self._unanswered)

    def begin(self, task_ids: Iterable[str], now_s: float) -> None:
        """The master has taken us in, and these tasks may run."""
        self._unanswered = set(task_ids)
        self._since_s = now_s
        self._pause_s = ASK_AGAIN_S
        self._ask_s = now_s + self._pause_s if self._unanswered else None
        self._implicit_s = now_s + (DEADLINE_S if self._unanswered else RECONCILE_AFTER_S)
        self._all_s = now_s + EVERY_S

    def doubt(self, task_ids: Iterable[str]) -> None:
        """It is not known whether the master has launched these tasks."""
        self._unanswered.update(task_ids)

    def stop(self) -> None:
        """The connection is gone."""
        self._ask_s = self._implicit_s = self._all_s = None

    def heard(self, task_id: str, now_s: float) -> None:
        """A task's state has come."""
        if task_id in self._unanswered:
            self._unanswered.discard(task_id)
            if not self._unanswered:
                self._ask_s = None
                if self._implicit_s is not None:
                    self._implicit_s = min(self._implicit_s, max(now_s, self._since_s + RECONCILE_AFTER_S))

    def explicit(self, now_s: float) -> frozenset[str]:
        """The tasks to ask for now; mostly none."""
        if not self._unanswered:
            return frozenset()
        if self._ask_s is None:
            self._pause_s = ASK_AGAIN_S
            self._ask_s = now_s + self._pause_s
        if now_s < self._ask_s:
            return frozenset()
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._ask_s = now_s + self._pause_s
        return self.unanswered

    def everything(self, now_s: float) -> bool:
        """Whether to ask for all tasks that we know of now."""
        if self._all_s is None or now_s < self._all_s:
            return False
        self._all_s = now_s + EVERY_S
        return True

    def implicit(self, now_s: float) -> bool:
        """Whether to ask for all there are now."""
        if self._implicit_s is None or now_s < self._implicit_s:
            return False
        self._implicit_s = now_s + EVERY_S
        return True
