"""Keras 3 `fit` on the chief: the loop stays there, the variables live on the ps, the workers compute the steps."""

from __future__ import annotations

from typing import Any

from dike.interception import after_import
from dike.roles.cluster import Cluster
from dike.task import TaskSpec

_TRAINER = "keras.src.backend.tensorflow.trainer"


def install(task: TaskSpec) -> None:
    """Makes `fit` of every Keras model distributed. Called when TensorFlow is imported."""
    cluster = Cluster(task)
    cluster.connect_at_first_use()

    def replace_fit(trainer: Any) -> None:
        # Imported only now: it needs Keras, which may itself be what imports TensorFlow.
        from dike.roles.keras_fit import fit

        trainer.TensorFlowTrainer.fit = fit.distributed(cluster)

    after_import(_TRAINER, replace_fit)
