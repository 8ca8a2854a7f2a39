"""The same with real TensorFlow: a job of version 1 with one worker, and trials of Keras.

On a CPU the losses of both are the same to the last bit in every run, so those of a run of which nothing is killed are
what has to come out.
"""

from __future__ import annotations

import functools

from framework.embedded.cluster import EmbeddedCluster
from tests.faults.chaos import AGENTS
from tests.faults.fault_stage import SCRIPTS, FaultStage

KERAS = SCRIPTS / "keras_trial" / "train.py"
UNDISTURBED_DEADLINE_S = 600.0


class TensorFlowStage(FaultStage):
    """A stage whose job and trials are on TensorFlow."""

    trial_script = KERAS
    slot_mem_mib = 1024.0
    preload = ("keras", "numpy")

    def submit_training(self, steps: int, pause_s: float = 0.05, *, workers: int = 1, max_restarts: int = 1000) -> str:
        """Adds a job; returns its id."""
        return self.submit_tensorflow(steps, pause_s, workers=workers)

    def undisturbed_trial(self, rate: str, steps: int) -> dict[int, str]:
        """Step -> loss of a trial that nothing has happened to."""
        lines = [line for line in self._undisturbed[1] if line[0] == rate]
        return {int(step): loss for _, _, step, loss in lines if int(step) <= steps}

    def undisturbed_job(self, steps: int) -> dict[int, str]:
        """The same of the training job."""
        return {step: loss for _, _, step, loss in self._undisturbed[0] if step <= steps}

    @functools.cached_property
    def _undisturbed(self) -> tuple[list[tuple[int, int, int, str]], list[list[str]]]:
        """The diaries of as many steps on a cluster of their own; each trial has a slot to itself."""
        folder = self.folder / "undisturbed"
        folder.mkdir()
        with EmbeddedCluster(AGENTS) as cluster, TensorFlowStage(cluster, folder) as stage:
            most = max(int(step) for _, _, step, _ in self.trial_diary())
            jobs = (
                stage.submit_training(self.last_step(), 0.0),
                stage.submit_search(self._rates, most, 0.0, slots=len(self._rates)),
            )
            stage.start_service()
            for job in jobs:
                stage.wait_for_end(job, deadline_s=UNDISTURBED_DEADLINE_S)
            return stage.diary(), stage.trial_diary()
