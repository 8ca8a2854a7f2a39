"""The policies by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from dike.exceptions import BadInputError
from framework.policies.asha import AshaPolicy
from framework.policies.dike_policy import DikePolicy
from framework.policies.fifo import FifoPolicy
from framework.policies.hermes import HermesPolicy
from framework.policies.hermes2 import Hermes2Policy
from framework.policies.interface import Policy, PolicySettings
from framework.policies.round_robin import RoundRobinPolicy
from framework.policies.slaq import SlaqPolicy

POLICIES: dict[str, Callable[[PolicySettings], Policy]] = {
    policy.name: policy
    for policy in (DikePolicy, HermesPolicy, Hermes2Policy, FifoPolicy, RoundRobinPolicy, SlaqPolicy, AshaPolicy)
}
"""Name -> what makes the policy; one object serves one search."""


def make_policy(name: str, settings: PolicySettings) -> Policy:
    """A new policy for one search.

    Raises:
        BadInputError: if there is none of that name.
    """
    if name not in POLICIES:
        near = difflib.get_close_matches(name.lower(), POLICIES, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise BadInputError(f"There is no policy '{name}'; {hint}choose one of {', '.join(sorted(POLICIES))}.")
    return POLICIES[name](settings)
