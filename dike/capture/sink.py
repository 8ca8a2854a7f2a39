"""Destination of captured profiles. Capturing ends the script, as its first training session has been replaced."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable, Iterable
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

    def loop_profile(self, how: str, trainable: Iterable[Any]) -> ModelProfile:
        """The profile of a script that trains in a way of its own: one task, with at most its variables known.

        `how` completes "it trains"; `trainable` are its trained variables, if they exist already.
        """
        specs = []
        if variables := list(trainable):
            # Not at the top: it imports Keras, which imports TensorFlow.
            from dike.keras3.model import unique_names

            specs = [VariableSpec.of(name, one, is_trained=True) for name, one in unique_names(variables)]
        return ModelProfile(
            name=self.script,
            api=Api.LOOP,
            parameters=sum(math.prod(spec.shape) for spec in specs),
            parameter_bytes=sum(spec.size_bytes for spec in specs),
            variables=tuple(sorted(specs, key=lambda spec: -spec.size_bytes)),
            flops_forward_per_sample=0.0,
            flops_step_per_sample=0.0,
            longest_path_flops=0.0,
            batch_size=self.batch_size or 0,
            # The optimizer is unknown: assumes Adam.
            optimizer_slots=2,
            why_alone=f"{self.script} trains {how}; {DISTRIBUTED}.",
        )

    def capture_loop(self, how: str, trainable: Iterable[Any]) -> NoReturn:
        self.capture(lambda: self.loop_profile(how, trainable))

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
