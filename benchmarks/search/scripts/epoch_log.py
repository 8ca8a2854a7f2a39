"""The log that trials of the measured searches write."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras

OnEpoch = Callable[[int, float, keras.Model], object]
"""Callback with epochs done, loss and model; may raise an exception to stop the training."""


class EpochLog(keras.callbacks.Callback):
    """Logs time, epochs done and loss at the start of training and after each epoch.

    Args:
        folder: has a file for each configuration, to append to.
        configuration: the trial's parameters, which name the file.
        initial_epoch: epochs that the model was trained for before.
    """

    def __init__(
        self, folder: Path, configuration: Mapping[str, Any], on_epoch: OnEpoch | None = None, initial_epoch: int = 0
    ) -> None:
        super().__init__()
        self._path = folder / f"{','.join(f'{name}={value}' for name, value in configuration.items())}.jsonl"
        self._on_epoch = on_epoch
        self._initial_epoch = initial_epoch

    def on_train_begin(self, logs: Any = None) -> None:
        self._write({"epochs": self._initial_epoch})

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        loss = float(logs["loss"])
        self._write({"epochs": epoch + 1, "loss": loss})
        if self._on_epoch is not None:
            self._on_epoch(epoch + 1, loss, self.model)

    def _write(self, line: dict[str, float]) -> None:
        with self._path.open("a", encoding="utf-8") as epoch_log:
            epoch_log.write(json.dumps({"time": time.time(), **line}) + "\n")
