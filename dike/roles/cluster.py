"""The chief's parameter server strategy and coordinator, Dike's own or the script's."""

from __future__ import annotations

import functools
import itertools
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from dike.checkpoints import shown
from dike.exceptions import JobFailedError
from dike.reporting import reporter
from dike.roles.rates import watch_coordinators
from dike.task import Role, TaskSpec

SERVERS_TIMEOUT_S = 600.0
POLL_INTERVAL_S = 0.1
_CONNECT_TIMEOUT_S = 1.0


class ServerCluster:
    """Connects to the job's servers, once.

    Connecting discards TensorFlow's local variables, datasets and functions, and fixes settings (`tf.config`), so it
    has to happen after the script's settings and before its first variable: see `connect_at_first_use`.
    """

    def __init__(self, task: TaskSpec) -> None:
        self.task = task
        self._lock = threading.RLock()
        self._strategy: Any = None

    @property
    def strategy(self) -> Any:
        with self._lock:
            if self._strategy is None:
                self._strategy = self._connect()
            return self._strategy

    @functools.cached_property
    def coordinator(self) -> Any:
        import tensorflow as tf

        watch_coordinators()
        return tf.distribute.coordinator.ClusterCoordinator(self.strategy)

    def connect_at_first_use(self) -> None:
        """Connects when TensorFlow initialises its runtime: at the script's first tensor or variable."""
        call_at_first_use(lambda: self.strategy)

    def _connect(self) -> Any:
        import tensorflow as tf

        servers = [(role, self.task.cluster.get(role, ())) for role in (Role.PS, Role.WORKER)]
        wait_for([(f"{role}:{index}", each) for role, found in servers for index, each in enumerate(found)])
        strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
        # A batch is one step of one worker, so it must not go to each of the worker's GPUs.
        strategy.extended._num_gpus_per_worker = min(1, strategy.extended._num_gpus_per_worker)
        return strategy


def call_at_first_use(action: Callable[[], object]) -> None:
    """Calls `action` when TensorFlow initialises its runtime: at the script's first tensor or variable."""
    from tensorflow.python.eager import context

    initialise = context.Context.ensure_initialized

    def act_and_initialise(this: Any) -> None:
        context.Context.ensure_initialized = initialise
        if not this._initialized:
            action()
        initialise(this)

    context.Context.ensure_initialized = act_and_initialise


def wait_for(servers: Iterable[tuple[str, str]]) -> None:
    """Waits until all servers, given as (task, address), accept connections.

    Raises:
        JobFailedError: one does not within `SERVERS_TIMEOUT_S`.
    """
    deadline_s = time.monotonic() + SERVERS_TIMEOUT_S
    for name, address in servers:
        while not is_listening(address):
            if time.monotonic() > deadline_s:
                raise JobFailedError(
                    f"{name} at {address} did not answer within {SERVERS_TIMEOUT_S:.0f} s; look at that task's log."
                )
            time.sleep(POLL_INTERVAL_S)


def host_and_port(address: str) -> tuple[str, int]:
    """Splits `host:port`, in which an IPv6 address may be in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_listening(address: str) -> bool:
    try:
        with socket.create_connection(host_and_port(address), timeout=_CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False


def install(task: TaskSpec, *, reports_steps: bool = True) -> None:
    """Supports a `ClusterCoordinator` outside Dike, the script's own or tf_keras': places variables and reports speeds.

    With `reports_steps`, reports the steps that are handed out too, where nothing more is known of progress.
    """
    _place_as_planned(task)
    watch_coordinators()
    if reports_steps:
        _report_steps()


def _report_steps() -> None:
    from tensorflow.python.distribute.coordinator import cluster_coordinator

    coordinator = cluster_coordinator.ClusterCoordinator
    schedule = coordinator.schedule
    steps = itertools.count(1)

    def schedule_and_report(self: Any, *args: Any, **kwargs: Any) -> Any:
        remote = schedule(self, *args, **kwargs)
        step = next(steps)
        if step == 1:
            reporter().placement(placed)
        reporter().progress(step)  # handed out; only the script knows when they are done
        return remote

    coordinator.schedule = schedule_and_report


def _place_as_planned(task: TaskSpec) -> None:
    """Makes the script's own strategy place planned variables on their ps; others are placed round robin."""
    from tensorflow.python.distribute import parameter_server_strategy_v2
    from tensorflow.python.framework import ops

    extended = parameter_server_strategy_v2.ParameterServerStrategyV2Extended
    create = extended._create_variable_round_robin

    def create_as_planned(self: Any, next_creator: Any, **kwargs: Any) -> Any:
        name = kwargs.get("name") or ""
        scope = ops.get_name_scope()
        planned = task.variables.get(f"{scope}/{name}" if scope else name, task.variables.get(name))
        if planned is not None:
            self._variable_count = planned
        variable = create(self, next_creator, **kwargs)
        placed[variable.name.partition(":")[0]] = variable.device
        return variable

    extended._create_variable_round_robin = create_as_planned


placed: dict[str, str] = {}
"""Variables that the script's own strategy has made so far: name -> device."""


def log(text: str) -> None:
    print(f"dike: {text}", file=sys.stderr, flush=True)


def log_restored(path: str, epoch: int, batch: int) -> None:
    """`epoch` is the current or next one, from 0; `batch` the number of its batches done."""
    where = f"after epoch {epoch}" if epoch and not batch else f"epoch {epoch + 1}, after batch {batch}"
    log(f"restored '{shown(path)}': {where}.")
