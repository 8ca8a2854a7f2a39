"""The policies for trials by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

from dike.exceptions import BadInputError
from framework.policies.trials.asha import AshaPolicy
from framework.policies.trials.dike_policy import DikePolicy
from framework.policies.trials.fifo import FifoPolicy
from framework.policies.trials.hermes import HermesPolicy
from framework.policies.trials.hermes2 import Hermes2Policy
from framework.policies.trials.interface import Policy, PolicySettings
from framework.policies.trials.pbt import PbtPolicy
from framework.policies.trials.round_robin import RoundRobinPolicy
from framework.policies.trials.slaq import SlaqPolicy

POLICIES: dict[str, Callable[[PolicySettings], Policy]] = {
    policy.name: policy
    for policy in (
        DikePolicy,
        HermesPolicy,
        Hermes2Policy,
        FifoPolicy,
        RoundRobinPolicy,
        SlaqPolicy,
        AshaPolicy,
        PbtPolicy,
    )
}
"""Name -> factory; each search has its own policy object."""


def make_policy(name: str, settings: PolicySettings) -> Policy:
    """Creates a policy for one search.

    Raises:
        BadInputError: if the name is unknown.
    """
    if name not in POLICIES:
        near = difflib.get_close_matches(name.lower(), POLICIES, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise BadInputError(f"There is no policy '{name}'; {hint}choose one of {', '.join(sorted(POLICIES))}.")
    return POLICIES[name](settings)


def check_learning(name: str, warm_start_from: Sequence[str]) -> None:
    """Checks that the policy can learn from other searches if any are named.

    Raises:
        BadInputError: if it cannot.
    """
    if warm_start_from and name != DikePolicy.name:
        raise BadInputError(
            f"--warm-start-from is for --policy {DikePolicy.name}; '{name}' uses only the trials of its own search."
        )
