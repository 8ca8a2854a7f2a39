"""What a job asks of Mesos."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from framework.driver import CallRefusedError, MasterUnavailableError

logger = logging.getLogger(__name__)


class MesosCalls(Protocol):
    """The calls a job makes; `framework.driver.Driver` does them on a real master."""

    def acceptOffers(self, offer_ids: Any, operations: Any, filters: Any = None) -> None: ...  # noqa: N802
    def declineOffer(self, offer_ids: Any, filters: Any = None) -> None: ...  # noqa: N802
    def acknowledgeStatusUpdate(self, status: dict[str, Any]) -> None: ...  # noqa: N802
    def reviveOffers(self) -> None: ...  # noqa: N802
    def suppressOffers(self) -> None: ...  # noqa: N802
    def sendFrameworkMessage(self, executor_id: Any, agent_id: Any, data: str) -> None: ...  # noqa: N802
    def kill(self, task_id: str, agent_id: str) -> None: ...
    def reconcile(self, tasks: dict[str, str]) -> None: ...


def try_now(call: Callable[..., None], *arguments: Any) -> bool:
    """Makes a call that need not succeed now: it is made again later, or made up for by reconciliation.

    Returns:
        Whether it succeeded.
    """
    try:
        call(*arguments)
    except (MasterUnavailableError, CallRefusedError) as error:
        logger.info("%s", error)
        return False
    return True
