"""What a Keras 3 model must not ask for in a distributed job; looked at before a launch, and again by the chief."""

from __future__ import annotations

from typing import Any

from dike.exceptions import BadInputError


def check(model: Any) -> None:
    """Makes sure that a compiled Keras 3 model can be trained on a cluster.

    Raises:
        BadInputError: naming what cannot be done there.
    """
    if model._distribute_strategy is not None:
        raise BadInputError(
            "The model was made under the script's own tf.distribute strategy; make it outside of its scope()."
        )
    if model.run_eagerly:
        raise BadInputError("compile(run_eagerly=True) is not supported in a distributed job; remove it.")
    if model.optimizer is None:
        raise BadInputError("Model.fit needs an optimizer in a distributed job; give one to compile().")
    if model.optimizer.gradient_accumulation_steps:
        raise BadInputError(
            "gradient_accumulation_steps is not supported in a distributed job: its workers share one accumulator; "
            "remove it and raise batch_size."
        )
