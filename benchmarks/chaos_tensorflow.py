"""`benchmarks.chaos` with real TensorFlow, and therefore fewer faults."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.chaos import chaos_on
from tests.faults.tensorflow_stage import TensorFlowStage

TITLE = "Chaos with TensorFlow"
FAULTS = 28


def measure() -> Iterator[str]:
    yield from chaos_on(
        TensorFlowStage,
        FAULTS,
        "(a chief that trains, a ps)",
        "the job a session of TensorFlow 1, the trials Keras' `fit` with dropout, Adam and shuffled arrays",
    )
