"""Keras 3 `fit` on the chief: the loop runs on the chief, the variables are on the ps, workers compute the steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from dike.interception import after_import
from dike.roles.cluster import ServerCluster
from dike.task import TaskSpec

_TRAINER = "keras.src.backend.tensorflow.trainer"


def install(task: TaskSpec) -> None:
    """Makes `fit` of every Keras model distributed. Called when TensorFlow is imported."""
    cluster = ServerCluster(task)
    cluster.connect_at_first_use()

    def replace_fit(trainer: Any) -> None:
        own_fit = trainer.TensorFlowTrainer.fit

        @functools.cache
        def distributed() -> Callable[..., Any]:
            # Imports all of Keras, which is itself still being imported at this point.
            from dike.keras3.job import fit

            return fit.distributed(cluster, own_fit)

        @functools.wraps(own_fit)
        def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
            return distributed()(self, *args, **kwargs)

        trainer.TensorFlowTrainer.fit = fit

    after_import(_TRAINER, replace_fit)
