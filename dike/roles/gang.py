"""The workers of a synchronous job: equal processes that sum tensors, over a ring of TCP or, on GPUs, by NCCL."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dike import process
from dike.exceptions import JobFailedError
from dike.own_distribution import free_ports
from dike.process import EXIT_CODE_PEER_LOST, end_process
from dike.reporting import reporter
from dike.roles.cluster import call_at_first_use, wait_for
from dike.roles.ring import Ring
from dike.task import Role, TaskSpec

if TYPE_CHECKING:
    import tensorflow as tf

BUCKET_BYTES = 64 << 20
"""Tensors are sent together, up to this size."""
_ON_GPUS = "GPU:0", "nccl"
"""Device and implementation of TensorFlow's collectives."""
PEER_LOST_WAIT_S = 3.0
"""Maximum time to notice that NCCL failed because another worker has ended."""


class Gang:
    """The workers, seen from one of them.

    Attributes:
        rank: index of this worker; 0 is the chief.
        size: number of workers.
        failure: why the last sum has failed, which TensorFlow's own error has in a traceback; None if none has.
    """

    def __init__(self, task: TaskSpec) -> None:
        self._addresses = task.cluster[Role.WORKER]
        self._has_gpu = task.gpus > 0
        self.rank = task.index
        self.size = len(self._addresses)
        self.failure: JobFailedError | None = None
        self._is_ending = threading.Event()
        self._ring = Ring(self._addresses, self.rank, f"{task.job_id} {task.attempt}", self._end_without)
        if self._has_gpu:
            # TensorFlow has to be configured before it initializes its runtime.
            call_at_first_use(self._configure_nccl)

    def _configure_nccl(self) -> None:
        from tensorflow.core.protobuf import tensorflow_server_pb2
        from tensorflow.python.eager import context
        from tensorflow.python.training import server_lib

        ports = np.zeros(self.size, np.int64)
        ports[self.rank] = free_ports(1)[0]
        hosts = [address.rpartition(":")[0] for address in self._addresses]
        servers = [f"{host}:{port}" for host, port in zip(hosts, self._ring.sum(ports), strict=True)]
        # The first worker's runtime starts alone; that of the others needs it.
        wait_for([(f"worker:{index}", address) for index, address in enumerate(servers[: self.rank])])
        own = context.context()
        own.configure_collective_ops(
            collective_leader="/job:worker/replica:0/task:0",
            device_filters=(f"/job:worker/task:{self.rank}",),
            use_nccl_communication=True,
        )
        own.enable_collective_ops(
            tensorflow_server_pb2.ServerDef(
                cluster=server_lib.ClusterSpec({"worker": servers}).as_cluster_def(),
                default_session_config=own.config,
                job_name="worker",
                task_index=self.rank,
                protocol="grpc",
            )
        )

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
        sums: list[Any] = [None] * len(tensors)
        for bucket in _buckets(tensors):
            parts = [tensors[index] for index in bucket]
            shapes = [tf.shape(part) for part in parts]
            flat = tf.concat([tf.reshape(part, [-1]) for part in parts], axis=0)
            found = tf.split(self._sum_flat(flat), [tf.size(part) for part in parts], num=len(parts))
            for index, shape, part, own in zip(bucket, shapes, found, parts, strict=True):
                sums[index] = tf.ensure_shape(tf.reshape(part, shape), own.shape)
        return sums

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

        if not (self._has_gpu and tensor.dtype.is_floating):
            return tf.ensure_shape(tf.numpy_function(self._sum_array, [tensor], tensor.dtype), tensor.shape)
        device, implementation = _ON_GPUS
        with tf.device(f"/job:worker/replica:0/task:{self.rank}/device:{device}"):
            return collective_ops.all_reduce_v2(
                tensor,
                group_size=self.size,
                group_key=1,
                instance_key=self._next_key.assign_add(1),
                communication_hint=implementation,
            )

    def _sum_array(self, array: NDArray[np.generic]) -> NDArray[np.generic]:
        try:
            return self._ring.sum(array)
        except JobFailedError as error:
            self.failure = error
            raise

    def end_if_peer_lost(self) -> None:
        """Waits a moment for the end of this process if another worker's end has made NCCL fail."""
        self._is_ending.wait(PEER_LOST_WAIT_S)

    def finish(self) -> None:
        """Waits at the end of the script until all workers have got there, so that none of them misses a peer."""
        barrier = np.zeros(1, np.int32)
        self._ring.sum(barrier)
        self._is_ending.set()
        with contextlib.suppress(OSError):  # all have got here; another one may have ended since
            self._ring.sum(barrier)

    def _end_without(self, peer: int) -> None:
        """Ends this process because another worker has ended, unless all scripts have."""
        if self._is_ending.is_set():
            return
        if process.termination.requested:
            process.termination.exit()
        address = self._addresses[peer]
        print(f"dike: worker:{peer} at {address} has ended; this worker ends, too.", file=sys.stderr, flush=True)
        reporter().close()
        end_process(EXIT_CODE_PEER_LOST)


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
