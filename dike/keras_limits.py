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
    optimizers = optimizers_of(model)
    if not optimizers:
        raise BadInputError("Model.fit needs an optimizer in a distributed job; give one to compile().")
    for optimizer in optimizers:
        if optimizer.gradient_accumulation_steps:
            raise BadInputError(
                "gradient_accumulation_steps is not supported in a distributed job: its workers share one "
                "accumulator; remove it and raise batch_size."
            )
        if optimizer.use_ema and optimizer.ema_overwrite_frequency:
            raise BadInputError(
                "ema_overwrite_frequency is not supported in a distributed job: a worker cannot replace weights "
                "that others train; remove it, and the averages replace them at the end."
            )


def optimizers_of(model: Any) -> list[Any]:
    """The compiled optimizer and those that the model's own `train_step` uses."""
    import keras

    optimizers = [] if model.optimizer is None else [model.optimizer]
    for value in vars(model).values():
        if isinstance(value, keras.optimizers.Optimizer) and all(value is not known for known in optimizers):
            optimizers.append(value)
    return optimizers
