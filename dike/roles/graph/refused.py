"""What a graph job cannot do, said by name where the script asks for it."""

from __future__ import annotations

from typing import Any, NoReturn

from tensorflow.python.training import supervisor

from dike.exceptions import BadInputError


def install() -> None:
    """Replaces what is refused."""

    def refuse(_self: Any, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise BadInputError(
            "tf.compat.v1.train.Supervisor is not supported in a distributed job; "
            "use tf.compat.v1.train.MonitoredTrainingSession."
        )

    supervisor.Supervisor.__init__ = refuse
