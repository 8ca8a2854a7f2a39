"""Checkpoints of trials that train with TensorFlow 1 sessions.

A folder `session-N` for each open session, the script's N-th; the random state; the run log of a replayed script.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dike import randomness
from dike.checkpoints import shown
from dike.exceptions import BadInputError
from dike.trial import folders
from dike.trial.runtime import TrialRuntime
from dike.trial.session_export import GRAPH_FILE
from dike.trial.spec import TrialSpec
from dike.v1 import training
from dike.v1.trial.runs import SessionLog

KIND = "graph"
RUNS = "runs.jsonl"
_RANDOMNESS = "randomness.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint to resume from; `meta` is its metadata, `read` returns the content of a file by name."""

    path: str
    meta: dict[str, Any]
    read: Callable[[str], bytes]

    def restore(self, sessions: Mapping[int, Any]) -> None:
        """Restores the sessions that were open, and the random state.

        Raises BadInputError if a session is missing or has another graph.
        """
        for number, saved in self.meta["sessions"].items():
            session = sessions.get(int(number))
            if session is None:
                raise BadInputError(
                    f"Checkpoint '{shown(self.path)}' holds a session that the script does not create any more; "
                    "undo the change, or begin a search of another name."
                )
            tracked = session._dike_trial
            tracked.state.restore(session, f"{self.path}/session-{number}", saved)
            tracked.increments_global_step = saved["counts"]
        randomness.restore(json.loads(self.read(_RANDOMNESS)))


def write(runtime: TrialRuntime, step: int, sessions: Mapping[int, Any], trainee: int, log: SessionLog | None) -> str:
    """Writes a checkpoint and returns its path.

    Args:
        runtime: the trial.
        step: the current step.
        sessions: number -> session, those to save.
        trainee: number of the session that trains.
        log: results of all runs, if the script is to be replayed.
    """
    path = runtime.spec.checkpoint_path(step)
    random_state = json.dumps(randomness.state()).encode()
    saved = {}
    for number, session in sessions.items():
        folder = f"{path}/session-{number}"
        tf.io.gfile.makedirs(folder)
        tracked = session._dike_trial
        saved[str(number)] = {**tracked.state.save(session, folder), "counts": tracked.increments_global_step}
    files = {_RANDOMNESS: random_state}
    meta: dict[str, Any] = {
        "kind": KIND,
        "step": step,
        "train_s": runtime.train_s,
        "standing": runtime.standing.to_json(),
        "sessions": saved,
        "trainee": trainee,
        "loss": _loss(sessions[trainee]),
    }
    graph = sessions[trainee]._dike_trial.state.meta_graph()
    if graph is not None:
        files[GRAPH_FILE] = graph
    if log is not None:
        files[RUNS] = log.dumps()
        meta["runs"] = len(log)
    folders.write(path, files, meta)
    folders.prune(path)
    return path


def write_best(runtime: TrialRuntime, session: Any) -> None:
    """Writes the variables of the session that trains, as the best so far."""
    step = runtime.step
    path = runtime.spec.best_path(step)
    tracked = session._dike_trial
    folder = f"{path}/session-{tracked.number}"
    tf.io.gfile.makedirs(folder)
    tracked.state.save_variables(session, folder)
    graph = tracked.state.meta_graph()
    meta = {"kind": KIND, "step": step, "train_s": runtime.train_s, "value": runtime.standing.best}
    folders.write(
        path, {} if graph is None else {GRAPH_FILE: graph}, {**meta, "trainee": tracked.number, "loss": _loss(session)}
    )
    folders.prune_best(path)


def _loss(session: Any) -> str | None:
    loss = training.of(session.graph).loss
    return None if loss is None else str(loss.name)


def find(spec: TrialSpec) -> Checkpoint | None:
    """The checkpoint that a run of the trial resumes from, if of this kind; None to start from scratch."""
    path = folders.checkpoint_to_resume(spec)
    if path is None:
        return None
    meta, read = folders.read(path)
    return Checkpoint(path, meta, read) if meta["kind"] == KIND else None
