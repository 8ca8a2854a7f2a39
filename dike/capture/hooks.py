"""Installs the interception that captures a script's model. Imports nothing before the script does."""

from __future__ import annotations

from types import ModuleType

from dike.capture.sink import Sink
from dike.interception import after_import
from dike.trial import script_api

_installed: list[Sink] = []


def install(sink: Sink) -> None:
    """Makes the script's first training session, `fit`, coordinator step or report go to the sink.

    Only the first call in a process counts: the script's import of dike must not replace `python -m dike.capture`.
    """
    if _installed:
        return
    _installed.append(sink)
    script_api.capture = lambda: sink.capture_loop("in a loop of its own, as its calls of dike.report say", [])

    def on_tensorflow(_: ModuleType) -> None:
        from dike.capture import coordinator, graph

        graph.install(sink)
        coordinator.install(sink)

    def on_keras(module: ModuleType) -> None:
        from dike.capture import coordinator, keras

        keras.install(sink, module)
        coordinator.watch_optimizers(sink, module)

    after_import("tensorflow", on_tensorflow)
    after_import("keras", on_keras)
    after_import("tf_keras", on_keras)
