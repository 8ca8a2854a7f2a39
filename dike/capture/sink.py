"""Where a captured profile goes. Capturing ends the script: after its first training session there is no way back."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from dike.exceptions import BadInputError
from dike.main_script import one_line
from dike.profile import ModelProfile

DISTRIBUTED = "Dike distributes tf.compat.v1 sessions, Keras' Model.fit and ClusterCoordinator loops"


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

    def refuse_to_train(self, step: str) -> NoReturn:
        """Refuses a script that trains in a way of its own, by what it calls there."""
        self.refuse(
            f"{self.script} trains by {step} in a loop of its own, without a training session or a call of fit, "
            f"so there is nothing to plan; {DISTRIBUTED}."
        )

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
