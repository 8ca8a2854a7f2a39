"""Runs the trials of the measured searches under Optuna with a pruner, in one process for each slot.

    python -m benchmarks.search.optuna_pruners PRUNER SCRIPT POINTS EPOCHS LOGS

SCRIPT is a module with a function `train`, POINTS a file of JSON lines, one configuration each. Prints the end of the
search, in seconds since the Unix epoch.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import MaxTrialsCallback
from optuna.trial import TrialState

SLOTS = 2
STUDY = "search"
_ARGUMENTS = 6
"""The program and its arguments; worker processes get the journal as well."""


def main() -> None:
    points, folder = Path(sys.argv[3]), Path(sys.argv[5]).parent
    journal = str(folder / "optuna.log")
    study = optuna.create_study(storage=_storage(journal), study_name=STUDY)
    configurations = points.read_text(encoding="utf-8").splitlines()
    for number in range(len(configurations)):
        study.enqueue_trial({"point": number})
    command = [sys.executable, "-m", "benchmarks.search.optuna_pruners", *sys.argv[1:], journal]
    workers = [subprocess.Popen(command) for _ in range(SLOTS)]
    codes = [worker.wait() for worker in workers]
    print(time.time())
    sys.exit(max(codes, key=abs))


def _storage(journal: str) -> JournalStorage:
    """The only storage without a server that never gives a queued trial to both processes."""
    return JournalStorage(JournalFileBackend(journal))


def _pruner(name: str, epochs: int) -> optuna.pruners.BasePruner:
    if name == "hyperband":
        return optuna.pruners.HyperbandPruner(max_resource=epochs)
    return optuna.pruners.MedianPruner()


def work(pruner: str, script: str, points: Path, epochs: int, logs: Path, journal: str) -> None:
    train = importlib.import_module(script).train
    configurations = [json.loads(line) for line in points.read_text(encoding="utf-8").splitlines()]
    count = len(configurations)
    study = optuna.load_study(study_name=STUDY, storage=_storage(journal), pruner=_pruner(pruner, epochs))

    def objective(trial: optuna.Trial) -> float:
        if trial.number >= count:
            raise optuna.TrialPruned  # both processes requested the last trial
        last = float("nan")

        def on_epoch(done: int, loss: float, _: Any) -> None:
            nonlocal last
            last = loss
            trial.report(loss, done)
            if trial.should_prune():
                raise optuna.TrialPruned

        number = trial.suggest_categorical("point", range(count))
        train(**configurations[number], epochs=epochs, logs=logs, on_epoch=on_epoch)
        return last

    begun = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
    study.optimize(objective, callbacks=[MaxTrialsCallback(count, states=begun)])


if __name__ == "__main__":
    if len(sys.argv) > _ARGUMENTS:
        work(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]), sys.argv[6])
    else:
        main()
