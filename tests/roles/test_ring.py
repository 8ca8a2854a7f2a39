"""The ring that sums arrays over the workers of a synchronous job."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dike.exceptions import JobFailedError
from dike.own_distribution import LOCALHOST, free_ports
from dike.roles import ring as module
from dike.roles.ring import SEGMENT_BYTES, Ring

pytestmark = pytest.mark.integration

DEADLINE_S = 60.0
DYING = """
import sys
from dike.roles.ring import Ring
import numpy as np
ring = Ring(sys.argv[2:], int(sys.argv[1]), "job", lambda peer: None)
ring.sum(np.ones(1))
print("joined", flush=True)
sys.stdin.read()
"""


class Rings:
    """The workers of one job, each in a thread."""

    def __init__(self, count: int) -> None:
        self.addresses = [f"{LOCALHOST}:{port}" for port in free_ports(count)]
        self.lost: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self.rings = [self.make(rank) for rank in range(count)]

    def make(self, rank: int, name: str = "job") -> Ring:
        return Ring(self.addresses, rank, name, lambda peer: self.lost.put((rank, peer)))

    def sums(self, arrays: list[Any]) -> list[Any]:
        """Results or errors of the workers."""
        with ThreadPoolExecutor(len(arrays)) as threads:
            found = [threads.submit(ring.sum, each) for ring, each in zip(self.rings, arrays, strict=True)]
            return [each.exception(DEADLINE_S) or each.result() for each in found]


@contextlib.contextmanager
def processes(count: int) -> Iterator[tuple[list[subprocess.Popen[str]], list[str]]]:
    addresses = [f"{LOCALHOST}:{port}" for port in free_ports(count)]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", DYING, str(rank), *addresses],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(1, count)
    ]
    try:
        yield started, addresses
    finally:
        for each in started:
            each.kill()
            each.communicate()


@pytest.mark.parametrize("count", [2, 3, 5])
def test_sums_are_equal_on_all_workers(count: int) -> None:
    rings = Rings(count)
    rng = np.random.default_rng()
    segment = SEGMENT_BYTES // 4
    for size in (0, 1, count - 1, count, 1000, count * segment, count * segment + 1, 3 * count * segment - 1):
        arrays = [rng.standard_normal(size).astype(np.float32) for _ in range(count)]
        before = [array.copy() for array in arrays]
        found = rings.sums(arrays)
        np.testing.assert_allclose(found[0], np.sum(arrays, axis=0), rtol=1e-4, atol=1e-5)
        for one, own, unchanged in zip(found, arrays, before, strict=True):
            np.testing.assert_array_equal(one, found[0])
            np.testing.assert_array_equal(own, unchanged)


@pytest.mark.parametrize(
    "kind", [np.bool_, np.int8, np.uint8, np.int64, np.float16, ml_dtypes.bfloat16, np.float64, np.complex64]
)
def test_all_kinds_of_numbers_are_summed(kind: Any) -> None:
    arrays = [(np.arange(6) % 3 * rank).reshape(2, 3).astype(kind) for rank in range(3)]
    for one in Rings(3).sums(arrays):
        assert (one.dtype, one.shape) == (arrays[0].dtype, (2, 3))
        np.testing.assert_array_equal(one, arrays[0] + arrays[1] + arrays[2])


def test_a_number_has_no_dimension() -> None:
    assert [one.shape for one in Rings(2).sums([np.float32(2.0), np.float32(3.0)])] == [(), ()]


def test_objects_are_refused() -> None:
    assert all(isinstance(one, TypeError) for one in Rings(2).sums([np.array(["a"], object)] * 2))


@pytest.mark.parametrize("other", [np.ones(3, np.float32), np.ones(2, np.float64)])
def test_workers_that_sum_unlike_arrays_fail_with_a_sentence(other: Any) -> None:
    for error in Rings(2).sums([np.ones(2, np.float32), other]):
        assert isinstance(error, JobFailedError)
        assert "do not make the same steps: this one is at sum 1 of" in str(error)


@pytest.mark.parametrize("name", ["job", "bob", "another"])
def test_only_the_worker_before_is_accepted(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(module, "_HELLO_TIMEOUT_S", 0.5)
    rings = Rings(3)
    host, port = rings.addresses[0].split(":")
    with contextlib.suppress(ConnectionError), socket.create_connection((host, int(port)), DEADLINE_S) as stranger:
        stranger.sendall(json.dumps([name, rings.addresses, 1]).encode())
        assert stranger.recv(1) == b""
    assert [float(one[0]) for one in rings.sums([np.ones(1)] * 3)] == [3.0] * 3


def test_the_end_of_a_neighbour_is_noticed_while_a_worker_computes() -> None:
    with processes(3) as (others, addresses):
        lost: queue.SimpleQueue[int] = queue.SimpleQueue()
        ring = Ring(addresses, 0, "job", lost.put)
        assert ring.sum(np.ones(1)) == [3.0]
        others[1].kill()
        assert lost.get(timeout=DEADLINE_S) == 2


def test_the_end_of_a_neighbour_is_noticed_in_a_sum() -> None:
    with processes(2) as ([other], addresses):
        lost: queue.SimpleQueue[int] = queue.SimpleQueue()
        ring = Ring(addresses, 0, "job", lost.put)
        ring.sum(np.ones(1))
        with ThreadPoolExecutor(1) as threads:
            found = threads.submit(ring.sum, np.ones(10_000_000))
            other.kill()
            assert isinstance(found.exception(DEADLINE_S), OSError)
        assert lost.get(timeout=DEADLINE_S) == 1
