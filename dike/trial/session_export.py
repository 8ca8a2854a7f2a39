"""Exports the variables of a TensorFlow 1 session as a checkpoint, and as a SavedModel if its graph allows."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Mapping
from typing import Any

from dike import plain_files
from dike.trial import folders

GRAPH_FILE = "graph.meta"
"""File of a trial's checkpoint: the graph of the training session."""
NAME = "model.ckpt"
SAVED_MODEL = "saved_model"

_READERS = ("Iterator", "IteratorV2", "OneShotIterator", "QueueDequeueV2", "QueueDequeueManyV2", "ReaderReadV2")
_LOGITS = ("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits")


def write(path: str, meta: Mapping[str, Any], target: str) -> None:
    """Writes the variables of the training session, `model.ckpt`, and its graph, `model.ckpt.meta`.

    A SavedModel is added if TensorFlow is installed and the graph can be loaded without the script's code. `path` is a
    trial's checkpoint, or the prefix of a TensorFlow checkpoint (`folders.TENSORFLOW`).
    """
    if meta["kind"] == folders.TENSORFLOW:
        folder, _, prefix = path.rpartition("/")
    else:
        folder, prefix = f"{path}/session-{int(meta['trainee'])}", "variables"
    with folders.local_copy(folder) as source:
        for name in os.listdir(source):
            if name.startswith(f"{prefix}."):
                plain_files.copy_file(source, name, f"{target}/{NAME}{name.removeprefix(prefix)}")
    with open(f"{target}/checkpoint", "w", encoding="utf-8") as file:
        file.write(f'model_checkpoint_path: "{NAME}"\nall_model_checkpoint_paths: "{NAME}"\n')
    if meta["kind"] != folders.TENSORFLOW:
        with contextlib.suppress(FileNotFoundError):
            graph = folders.read(path)[1](GRAPH_FILE)
            with open(f"{target}/{NAME}.meta", "wb") as file:
                file.write(graph)
    if not os.path.isfile(f"{target}/{NAME}.meta"):
        return
    problem = _write_saved_model(f"{target}/{NAME}", f"{target}/{SAVED_MODEL}", meta.get("loss"))
    if problem:
        print(f"dike: no SavedModel beside the checkpoint: {problem}", file=sys.stderr, flush=True)


def _write_saved_model(checkpoint: str, target: str, loss: str | None) -> str:
    """Writes a SavedModel with a signature from placeholders to logits, or to the loss if there are none.

    Returns:
        Why it cannot be written; empty if it was.
    """
    try:
        import tensorflow as tf
    except ImportError:
        return "TensorFlow is not installed here"
    from dike.graphs import ancestors

    v1 = tf.compat.v1
    shutil.rmtree(target, ignore_errors=True)
    try:
        with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
            v1.train.import_meta_graph(f"{checkpoint}.meta", clear_devices=True)
            ops = graph.get_operations()
            outputs = {"loss": graph.get_tensor_by_name(loss)} if loss is not None else {}
            logits = next((op.inputs[0] for op in ops if op.type in _LOGITS), None)
            if logits is not None:
                outputs = {"logits": logits}
            needed = ancestors([tensor.op for tensor in outputs.values()])
            if any(op.type in _READERS for op in needed):
                return "its model reads the data itself"
            inputs = {op.name: op.outputs[0] for op in needed if op.type.startswith("Placeholder")}
            if not inputs:
                return "its model has no placeholders"
            saved = {name for name, _ in tf.train.list_variables(checkpoint)}
            variables = [each for each in v1.global_variables() if each.op.name in saved]
            v1.train.Saver(variables).restore(session, checkpoint)
            builder = v1.saved_model.Builder(target)
            signature = v1.saved_model.predict_signature_def(inputs, outputs)
            tags, signatures = [v1.saved_model.tag_constants.SERVING], {"serving_default": signature}
            builder.add_meta_graph_and_variables(session, tags, signatures, clear_devices=True)
            builder.save()
    except (ValueError, KeyError, TypeError, tf.errors.OpError) as error:
        shutil.rmtree(target, ignore_errors=True)
        return str(error).partition("\n")[0]
    return ""
