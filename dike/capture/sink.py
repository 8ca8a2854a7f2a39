"""Where a captured profile goes. Capturing ends the script: after its first training session there is no way back."""

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
"""Scripts with a coordinator of their own ask it which task they are; nothing connects to these addresses."""


@dataclass(frozen=True)
class Sink:
    """What the interception does with what it finds.

    Attributes:
        script: what the profile is called: the script's file name.
        batch_size: plans for batches of this size in place of the script's; None for the script's.
        deliver: takes the profile and ends the process.
        refuse: takes one sentence on why there is none, and ends the process.
    """

    script: str
    batch_size: int | None
    deliver: Callable[[ModelProfile], NoReturn]
    refuse: Callable[[str], NoReturn]

    def loop_profile(self, how: str, trainable: Iterable[Any]) -> ModelProfile:
        """What is known of a script that trains in a way of its own: it can be one task, and no more.

        Args:
            how: what follows "it trains".
            trainable: the variables that it trains, as far as they are there.
        """
        specs = []
        if variables := list(trainable):
            # It imports Keras, and Keras imports TensorFlow.
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
            # As Adam does; which optimizer it is, and whether there is one, is the script's affair.
            optimizer_slots=2,
            why_alone=f"{self.script} trains {how}; {DISTRIBUTED}.",
        )

    def capture_loop(self, how: str, trainable: Iterable[Any]) -> NoReturn:
        """Delivers `loop_profile`."""
        self.capture(lambda: self.loop_profile(how, trainable))

    def capture(self, read: Callable[[], ModelProfile]) -> NoReturn:
        """Reads the profile and delivers it, or refuses with the reason why it cannot be read."""
        try:
            profile = read()
        except BadInputError as error:
            self.refuse(str(error))
        except Exception as error:
            # Let through, it would surface inside the script's own `try` blocks.
            traceback.print_exc()
            self.refuse(f"The model of {self.script} could not be read ({one_line(error)}); see above.")
        self.deliver(profile)
