"""Destination of captured profiles. Capturing ends the script, as its first training session has been replaced."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from dike.exceptions import BadInputError
from dike.main_script import one_line
from dike.profile import Api, ModelProfile, VariableSpec

DISTRIBUTED = "Dike distributes tf.compat.v1 sessions, Keras' Model.fit and ClusterCoordinator loops"

TF_CONFIG = json.dumps(
    {
        "cluster": {"chief": ["localhost:1"], "ps": ["localhost:2"], "worker": ["localhost:3"]},
        "task": {"type": "chief", "index": 0},
    }
)
"""For scripts with a coordinator of their own, which need a cluster in it. Nothing connects to these addresses."""


@dataclass(frozen=True)
class Sink:
    """Receives the captured profile.

    Attributes:
        script: the script's file name, which becomes the profile's name.
        batch_size: samples per step in place of the script's own, if any.
        deliver: takes the profile and ends the process.
        refuse: takes one sentence on why there is none, and ends the process.
    """

    script: str
    batch_size: int | None
    deliver: Callable[[ModelProfile], NoReturn]
    refuse: Callable[[str], NoReturn]

    def loop_profile(self, how: str, trainable: Iterable[Any], own_distribution: str = "") -> ModelProfile:
        """See `loop_profile` of this module; `trainable` are the trained variables, if they exist already."""
        specs = []
        if variables := list(trainable):
            # Not at the top: it imports Keras, which imports TensorFlow.
            from dike.keras3.model import unique_names

            specs = [VariableSpec.of(name, one, is_trained=True) for name, one in unique_names(variables)]
        return loop_profile(self.script, how, specs, self.batch_size, own_distribution)

    def capture_loop(self, how: str, trainable: Iterable[Any], own_distribution: str = "") -> NoReturn:
        self.capture(lambda: self.loop_profile(how, trainable, own_distribution))

    def capture(self, read: Callable[[], ModelProfile]) -> NoReturn:
        """Reads the profile and delivers it, or refuses with the reason why it cannot be read."""
        try:
            profile = read()
        except BadInputError as error:
            self.refuse(str(error))
        except Exception as error:
            # The script's own `try` blocks must not catch it.
            traceback.print_exc()
            self.refuse(f"The model of {self.script} cannot be read ({one_line(error)}); see above.")
        self.deliver(profile)


def loop_profile(
    script: str,
    how: str,
    variables: Sequence[VariableSpec] = (),
    batch_size: int | None = None,
    own_distribution: str = "",
) -> ModelProfile:
    """The profile of a script that trains in a way of its own, with at most its variables known.

    Args:
        script: its file name.
        how: completes "it trains".
        variables: what it trains.
        batch_size: samples per step; None if unknown.
        own_distribution: the library with which it distributes itself; empty if it does not.
    """
    return ModelProfile(
        name=script,
        api=Api.LOOP,
        parameters=sum(math.prod(spec.shape) for spec in variables),
        parameter_bytes=sum(spec.size_bytes for spec in variables),
        variables=tuple(sorted(variables, key=lambda spec: -spec.size_bytes)),
        flops_forward_per_sample=0.0,
        flops_step_per_sample=0.0,
        longest_path_flops=0.0,
        batch_size=batch_size or 0,
        # The optimizer is unknown: assumes Adam.
        optimizer_slots=2,
        why_alone=f"{script} trains {how}; {DISTRIBUTED}.",
        own_distribution=own_distribution,
    )
