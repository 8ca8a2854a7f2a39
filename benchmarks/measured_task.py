"""A TensorFlow server of the measured experiment and, on a worker, the training steps.

    python -m benchmarks.measured_task ADDRESSES INDEX

Prints "started", then reads pairs of lines: a `Training`, answered by "ready", and the time (`time.monotonic()`) until
which to train, answered by the times of the steps. End of input ends the process, so that it never outlives its parent.

The model is a chain of square dense layers. A step pulls every variable from its ps, waits as long as an accelerator
would compute (one machine has too few cores for a cluster of GPUs), computes the gradients and pushes them, dense, to
the ps, which apply them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

BATCH_SIZE = 2
LEARNING_RATE = 1e-3
STEP_TIMEOUT_MS = 120_000
JOB = "task"


@dataclass(frozen=True)
class Training:
    """What to train, and where. Tasks are indices of the cluster's servers.

    Attributes:
        width: inputs and outputs of each layer, whose variable has width x width floats of 4 bytes.
        ps_of_layer: task that stores each layer's variable.
        workers: tasks that compute.
        compute_s: seconds of an accelerator's step.
        synchronous: whether the workers' gradients are averaged before each update.
    """

    width: int
    ps_of_layer: tuple[int, ...]
    workers: tuple[int, ...]
    compute_s: float
    synchronous: bool

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Training:
        values = json.loads(text)
        return cls(**{**values, "ps_of_layer": tuple(values["ps_of_layer"]), "workers": tuple(values["workers"])})


def main() -> None:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    addresses, index = sys.argv[1].split(","), int(sys.argv[2])
    server = tf.train.Server({JOB: addresses}, job_name=JOB, task_index=index, config=_config(tf))
    _send("started")
    for line in sys.stdin:
        training = Training.loads(line)
        session, step = _prepare(tf, server.target, training, index, initialize=index == training.workers[0])
        with session:
            _send("ready")
            _send(_steps(tf, session, step, float(sys.stdin.readline())))
    # TensorFlow's servers cannot be stopped.
    os._exit(0)


def _send(value: object) -> None:
    print(json.dumps(value), flush=True)


def _config(tf: Any, tasks: Iterable[int] = ()) -> Any:
    """Session or server configuration; a session with `tasks` communicates with these only."""
    config = tf.ConfigProto(
        intra_op_parallelism_threads=1,
        inter_op_parallelism_threads=2,
        device_filters=[f"/job:{JOB}/task:{task}" for task in tasks],
    )
    # Keeps Grappler from moving the wait before the pull.
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config


def _prepare(tf: Any, target: str, training: Training, worker: int, *, initialize: bool) -> tuple[Any, Any]:
    """Returns session and train op of this worker or, in synchronous training, of all workers."""
    computing = training.workers if training.synchronous else (worker,)
    with tf.Graph().as_default() as graph:
        variables = [_variable(tf, training.width, layer, ps) for layer, ps in enumerate(training.ps_of_layer)]
        towers = [_Tower(tf, variables, task, training) for task in computing]
        pairs: list[tuple[Any, Any]] = []
        for variable, *parts in zip(variables, *(tower.gradients for tower in towers), strict=True):
            with tf.device(variable.device):
                pairs.append((tf.add_n(parts) / len(parts), variable))
        step = tf.train.GradientDescentOptimizer(LEARNING_RATE).apply_gradients(pairs)
        first = [tower.initializer for tower in towers]
        if initialize:
            first.append(tf.variables_initializer(variables))
    session = tf.Session(target, graph, _config(tf, {*training.ps_of_layer, *computing}))
    session.run(first)
    return session, step


def _variable(tf: Any, width: int, layer: int, ps: int) -> Any:
    with tf.device(_device(ps)):
        # Variables survive on the servers between trainings, so the width is part of the name.
        name, initializer = f"layer_{layer}_{width}", tf.glorot_uniform_initializer(seed=layer)
        return tf.get_variable(name, (width, width), initializer=initializer, use_resource=True)


class _Tower:
    """One worker's part of the graph.

    Attributes:
        gradients: gradient of each variable, on the worker.
        initializer: op to run before the first step.
    """

    def __init__(self, tf: Any, variables: Sequence[Any], worker: int, training: Training) -> None:
        stored = []
        for variable in variables:
            with tf.device(variable.device):
                stored.append(variable.read_value())
        with tf.device(_device(worker)):
            pulled = [tf.identity(value) for value in stored]
            samples = tf.data.Dataset.from_tensors(tf.ones((BATCH_SIZE, training.width))).repeat()
            waiting = tf.raw_ops.SleepDataset(
                input_dataset=tf.data.experimental.to_variant(samples),
                sleep_microseconds=tf.constant(round(training.compute_s * 1e6), tf.int64),
                output_types=[tf.float32],
                output_shapes=[(BATCH_SIZE, training.width)],
            )
            dataset = tf.data.experimental.from_variant(waiting, samples.element_spec)
            iterator = tf.data.make_initializable_iterator(dataset.with_options(_no_prefetch(tf)))
            with tf.control_dependencies(pulled):
                activation = iterator.get_next()
            for weights in pulled:
                activation = tf.tanh(activation @ weights)
            self.gradients = tf.gradients(tf.reduce_mean(tf.square(activation - 1.0)), pulled)
            self.initializer = iterator.initializer


def _no_prefetch(tf: Any) -> Any:
    """Options of a dataset that starts to wait only when the next element is requested."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.inject_prefetch = False
    return options


def _device(task: int) -> str:
    return f"/job:{JOB}/task:{task}/device:CPU:0"


def _steps(tf: Any, session: Any, step: Any, until_s: float) -> list[float]:
    """Trains until `until_s` by `time.monotonic()`; returns the time of the start and of each step's end."""
    options = tf.RunOptions(timeout_in_ms=STEP_TIMEOUT_MS)
    times = [time.monotonic()]
    while times[-1] < until_s:
        session.run(step, options=options)
        times.append(time.monotonic())
    return times


if __name__ == "__main__":
    main()
