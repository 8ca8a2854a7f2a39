"""The workers of a synchronous job: equal processes that sum tensors by TensorFlow's collectives.

A ring all-reduce moves 2 (n-1)/n of a tensor's bytes through each of n links (Patarasuk & Yuan, JPDC 2009).
"""

from __future__ import annotations

import contextlib
import functools
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from dike import process
from dike.process import EXIT_CODE_PEER_LOST, end_process
from dike.reporting import reporter
from dike.roles.cluster import POLL_INTERVAL_S, call_at_first_use, is_listening, wait_for
from dike.task import Role, TaskSpec

if TYPE_CHECKING:
    import tensorflow as tf

BUCKET_BYTES = 64 << 20
"""Tensors are sent together, up to this size."""
PEER_LOST_WAIT_S = 3.0
"""Maximum time to notice that a collective failed because another worker has ended."""
_SUMMED = frozenset({"bfloat16", "float16", "float32", "float64", "int32", "int64"})
"""Types that TensorFlow's all-reduce takes; others are sent as int64."""
_GROUP_KEY = 1


class Gang:
    """The workers, seen from one of them.

    Attributes:
        rank: index of this worker; 0 is the chief.
        size: number of workers.
    """

    def __init__(self, task: TaskSpec) -> None:
        self._addresses = task.cluster[Role.WORKER]
        self._has_gpu = task.gpus > 0
        self.rank = task.index
        self.size = len(self._addresses)
        self._is_connected = False
        self._is_ending = threading.Event()

    def connect_at_first_use(self) -> None:
        """Connects when TensorFlow initializes its runtime: at the script's first tensor or variable."""
        call_at_first_use(self._connect)

    def _connect(self) -> None:
        from tensorflow.core.protobuf import tensorflow_server_pb2
        from tensorflow.python.eager import context
        from tensorflow.python.training import server_lib

        # The first worker's runtime starts alone; that of the others needs it.
        wait_for([(f"worker:{index}", address) for index, address in enumerate(self._addresses[: self.rank])])
        self._is_connected = True
        own = context.context()
        own.configure_collective_ops(
            collective_leader="/job:worker/replica:0/task:0",
            device_filters=(f"/job:worker/task:{self.rank}",),
            use_nccl_communication=self._has_gpu,
        )
        own.enable_collective_ops(
            tensorflow_server_pb2.ServerDef(
                cluster=server_lib.ClusterSpec({"worker": self._addresses}).as_cluster_def(),
                default_session_config=own.config,
                job_name="worker",
                task_index=self.rank,
                protocol="grpc",
            )
        )
        for index, address in enumerate(self._addresses):
            if index != self.rank:
                name = f"dike-watch-{index}"
                threading.Thread(target=self._watch, args=(index, address), name=name, daemon=True).start()

    @functools.cached_property
    def _next_key(self) -> tf.Variable:
        """Number of the next collective. Each execution needs a new one, in loops of a graph as well."""
        import tensorflow as tf

        with tf.init_scope(), tf.device("CPU:0"):
            return tf.Variable(1, dtype=tf.int32, trainable=False, name="dike_collective")

    def sum(self, tensors: Sequence[Any]) -> list[Any]:
        """Returns the sums of each tensor over all workers, of which each has to make the same calls in the same order.

        Shapes and types are the same on all workers.
        """
        import tensorflow as tf

        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        kinds = [tensor.dtype for tensor in tensors]
        tensors = [tensor if tensor.dtype.name in _SUMMED else tf.cast(tensor, tf.int64) for tensor in tensors]
        sums: list[Any] = [None] * len(tensors)
        for bucket in _buckets(tensors):
            parts = [tensors[index] for index in bucket]
            shapes = [tf.shape(part) for part in parts]
            flat = tf.concat([tf.reshape(part, [-1]) for part in parts], axis=0)
            found = tf.split(self._sum_flat(flat), [tf.size(part) for part in parts], num=len(parts))
            for index, shape, part, own in zip(bucket, shapes, found, parts, strict=True):
                sums[index] = tf.ensure_shape(tf.reshape(part, shape), own.shape)
        return [tf.cast(each, kind) for each, kind in zip(sums, kinds, strict=True)]

    def sum_through(self, tensor: Any, share: Any) -> Any:
        """Like `sum`, of one tensor, with the gradient of a loss that is the mean of the workers' losses.

        Args:
            tensor: this worker's summand.
            share: weight of this worker's loss in that mean.
        """
        import tensorflow as tf

        @tf.custom_gradient
        def summed(own: Any) -> Any:
            def gradient(upstream: Any) -> Any:
                weight = tf.cast(share, upstream.dtype)
                return tf.math.divide_no_nan(self.sum([upstream * weight])[0], weight)

            return self.sum([own])[0], gradient

        return summed(tensor)

    def rows(self, row: Any) -> Any:
        """Returns the rows of all workers, by rank: (...) -> (size, ...)."""
        return self.sum([self.row(row)])[0]

    def row(self, row: Any) -> Any:
        """Returns the summand of this worker from which `sum` makes the rows of all."""
        import tensorflow as tf

        own = tf.one_hot(self.rank, self.size, dtype=row.dtype)
        return tf.reshape(own, [self.size, *[1] * row.shape.rank]) * row

    def _sum_flat(self, tensor: Any) -> Any:
        import tensorflow as tf
        from tensorflow.python.ops import collective_ops

        on_gpu = self._has_gpu and tensor.dtype.is_floating
        with tf.device(f"/job:worker/replica:0/task:{self.rank}/device:{'GPU' if on_gpu else 'CPU'}:0"):
            return collective_ops.all_reduce_v2(
                tensor,
                group_size=self.size,
                group_key=_GROUP_KEY + on_gpu,
                instance_key=self._next_key.assign_add(1),
                communication_hint="nccl" if on_gpu else "ring",
            )

    def _watch(self, index: int, address: str) -> None:
        """Ends the process when another worker ends: not all collectives would fail."""
        while not is_listening(address):  # its process may start late; the framework ends this one if it never does
            time.sleep(POLL_INTERVAL_S)
        while _stay_connected(address):
            pass
        if not self._is_ending.is_set():
            self._end(f"worker:{index} at {address} has ended")

    def end_if_peer_lost(self) -> None:
        """Waits a moment for the end of this process if another worker's end has made a collective fail."""
        self._is_ending.wait(PEER_LOST_WAIT_S)

    def finish(self) -> None:
        """Waits at the end of the script until all workers have got there, so that none of them misses a peer."""
        if not self._is_connected:
            return
        import tensorflow as tf

        try:
            self.sum([1])
        except tf.errors.OpError as error:
            self._end(f"another worker has ended before its script has ({type(error).__name__})")
        self._is_ending.set()
        with contextlib.suppress(tf.errors.OpError):  # all have got here; another one may have ended since
            self.sum([1])

    def _end(self, why: str) -> NoReturn:
        if process.termination.requested:
            process.termination.exit()
        print(f"dike: {why}; this worker ends, too.", file=sys.stderr, flush=True)
        reporter().close()
        end_process(EXIT_CODE_PEER_LOST)


def _stay_connected(address: str) -> bool:
    """Connects to a gRPC server and returns when it closes the connection; returns whether it was there."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port))) as connection:
            # It begins with its settings, and ends the connection after some minutes without ours.
            if not connection.recv(1024):
                return False
            while connection.recv(1024):
                pass
    except OSError:
        return is_listening(address)
    return True


def _buckets(tensors: Sequence[Any]) -> list[list[int]]:
    """Groups the indices of tensors of one type, up to `BUCKET_BYTES` each."""
    buckets: list[list[int]] = []
    open_ones: dict[Any, tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        size = (tensor.shape.num_elements() or 1) * tensor.dtype.size
        bucket, filled = open_ones.get(tensor.dtype, ([], 0))
        if not bucket or filled + size > BUCKET_BYTES:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(index)
        open_ones[tensor.dtype] = bucket, filled + size
    return buckets
